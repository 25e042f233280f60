from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ENGINE: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_OPERATOR: _ClassVar[Role]
    ROLE_PLANE: _ClassVar[Role]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_BFLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT8_E4M3FN: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT8_E5M2: _ClassVar[ElementType]
    ELEMENT_TYPE_UINT8: _ClassVar[ElementType]

class CacheKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_KIND_UNSPECIFIED: _ClassVar[CacheKind]
    CACHE_KIND_KEYS_AND_VALUES: _ClassVar[CacheKind]
    CACHE_KIND_LATENT: _ClassVar[CacheKind]
    CACHE_KIND_STATE: _ClassVar[CacheKind]
    CACHE_KIND_OPAQUE: _ClassVar[CacheKind]
ROLE_UNSPECIFIED: Role
ROLE_ENGINE: Role
ROLE_ROUTER: Role
ROLE_OPERATOR: Role
ROLE_PLANE: Role
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_FLOAT16: ElementType
ELEMENT_TYPE_BFLOAT16: ElementType
ELEMENT_TYPE_FLOAT8_E4M3FN: ElementType
ELEMENT_TYPE_FLOAT8_E5M2: ElementType
ELEMENT_TYPE_UINT8: ElementType
CACHE_KIND_UNSPECIFIED: CacheKind
CACHE_KIND_KEYS_AND_VALUES: CacheKind
CACHE_KIND_LATENT: CacheKind
CACHE_KIND_STATE: CacheKind
CACHE_KIND_OPAQUE: CacheKind

class Callers(_message.Message):
    __slots__ = ("roles",)
    ROLES_FIELD_NUMBER: _ClassVar[int]
    roles: bytes
    def __init__(self, roles: _Optional[bytes] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("name", "layers", "num_kv_heads", "head_size", "sliding_window_tokens", "key_scales", "value_scales", "cache_kind", "value_head_size", "page_bytes", "block_pattern")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    CACHE_KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_PATTERN_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_kv_heads: int
    head_size: int
    sliding_window_tokens: int
    key_scales: _containers.RepeatedScalarFieldContainer[float]
    value_scales: _containers.RepeatedScalarFieldContainer[float]
    cache_kind: CacheKind
    value_head_size: int
    page_bytes: int
    block_pattern: BlockPattern
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., sliding_window_tokens: _Optional[int] = ..., key_scales: _Optional[_Iterable[float]] = ..., value_scales: _Optional[_Iterable[float]] = ..., cache_kind: _Optional[_Union[CacheKind, str]] = ..., value_head_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., block_pattern: _Optional[_Union[BlockPattern, _Mapping]] = ...) -> None: ...

class BlockPattern(_message.Message):
    __slots__ = ("block_tokens", "local_blocks", "vertical_stride", "head_sliding_step")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERTICAL_STRIDE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SLIDING_STEP_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    local_blocks: int
    vertical_stride: int
    head_sliding_step: int
    def __init__(self, block_tokens: _Optional[int] = ..., local_blocks: _Optional[int] = ..., vertical_stride: _Optional[int] = ..., head_sliding_step: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("model_id", "block_size_tokens", "dtype", "kv_dtype", "groups", "fingerprint")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    block_size_tokens: int
    dtype: ElementType
    kv_dtype: ElementType
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    fingerprint: bytes
    def __init__(self, model_id: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., dtype: _Optional[_Union[ElementType, str]] = ..., kv_dtype: _Optional[_Union[ElementType, str]] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("index", "num_shards", "first_layer", "num_layers", "first_kv_head", "num_kv_heads", "copy")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_shards: int
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    copy: int
    def __init__(self, index: _Optional[int] = ..., num_shards: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., copy: _Optional[int] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("shard", "epoch", "address", "connected", "has_file_tier")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    HAS_FILE_TIER_FIELD_NUMBER: _ClassVar[int]
    shard: Shard
    epoch: int
    address: str
    connected: bool
    has_file_tier: bool
    def __init__(self, shard: _Optional[_Union[Shard, _Mapping]] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., connected: bool = ..., has_file_tier: bool = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("group", "tier", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_retired_blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETIRED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: Tier
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_retired_blocks: int
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_retired_blocks: _Optional[int] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("group", "tier", "indices", "generations")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: Tier
    indices: bytes
    generations: bytes
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., indices: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class SessionRef(_message.Message):
    __slots__ = ("incarnation", "session_id")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    session_id: int
    def __init__(self, incarnation: _Optional[int] = ..., session_id: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data", "memory")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    dtype: ElementType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    memory: MemoryRange
    def __init__(self, dtype: _Optional[_Union[ElementType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., memory: _Optional[_Union[MemoryRange, _Mapping]] = ...) -> None: ...

class MemoryRange(_message.Message):
    __slots__ = ("region_id", "offset_bytes")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    offset_bytes: int
    def __init__(self, region_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_delay", "request_id", "next_number")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    field: str
    retry_delay: _duration_pb2.Duration
    request_id: str
    next_number: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., next_number: _Optional[int] = ...) -> None: ...

class SignedPayload(_message.Message):
    __slots__ = ("type", "payload", "signature")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    type: str
    payload: bytes
    signature: bytes
    def __init__(self, type: _Optional[str] = ..., payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
