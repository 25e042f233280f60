from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_FLOAT16: ElementType
ELEMENT_TYPE_BFLOAT16: ElementType
ELEMENT_TYPE_FLOAT8_E4M3FN: ElementType
ELEMENT_TYPE_FLOAT8_E5M2: ElementType

class ProtocolRange(_message.Message):
    __slots__ = ("oldest", "newest")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("name", "layers", "num_kv_heads", "head_size", "sliding_window_tokens", "key_scales", "value_scales")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_kv_heads: int
    head_size: int
    sliding_window_tokens: int
    key_scales: _containers.RepeatedScalarFieldContainer[float]
    value_scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., sliding_window_tokens: _Optional[int] = ..., key_scales: _Optional[_Iterable[float]] = ..., value_scales: _Optional[_Iterable[float]] = ...) -> None: ...

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
    __slots__ = ("index", "num_shards", "first_layer", "num_layers", "first_kv_head", "num_kv_heads")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_shards: int
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    def __init__(self, index: _Optional[int] = ..., num_shards: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., num_kv_heads: _Optional[int] = ...) -> None: ...

class BlockRef(_message.Message):
    __slots__ = ("tier", "index", "generation")
    TIER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    index: int
    generation: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., index: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("tier", "indices", "generations")
    TIER_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: ElementType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[ElementType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_delay")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    field: str
    retry_delay: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SignedPayload(_message.Message):
    __slots__ = ("type", "payload", "signature")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    type: str
    payload: bytes
    signature: bytes
    def __init__(self, type: _Optional[str] = ..., payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SessionGrant(_message.Message):
    __slots__ = ("pool_id", "shard_epochs", "incarnation", "session_id", "tenant", "layout_fingerprint", "max_plans_in_flight")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    shard_epochs: _containers.RepeatedScalarFieldContainer[int]
    incarnation: int
    session_id: int
    tenant: str
    layout_fingerprint: bytes
    max_plans_in_flight: int
    def __init__(self, pool_id: _Optional[str] = ..., shard_epochs: _Optional[_Iterable[int]] = ..., incarnation: _Optional[int] = ..., session_id: _Optional[int] = ..., tenant: _Optional[str] = ..., layout_fingerprint: _Optional[bytes] = ..., max_plans_in_flight: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("pool_id", "shard_epochs", "incarnation", "session_id", "number", "previous", "resync", "changes", "transfers", "rows")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    shard_epochs: _containers.RepeatedScalarFieldContainer[int]
    incarnation: int
    session_id: int
    number: int
    previous: int
    resync: bool
    changes: _containers.RepeatedCompositeFieldContainer[TableChange]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    def __init__(self, pool_id: _Optional[str] = ..., shard_epochs: _Optional[_Iterable[int]] = ..., incarnation: _Optional[int] = ..., session_id: _Optional[int] = ..., number: _Optional[int] = ..., previous: _Optional[int] = ..., resync: bool = ..., changes: _Optional[_Iterable[_Union[TableChange, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ...) -> None: ...

class TableChange(_message.Message):
    __slots__ = ("sequence_id", "group", "set", "fork", "drop")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    group: int
    set: SetBlocks
    fork: ForkTable
    drop: DropTable
    def __init__(self, sequence_id: _Optional[int] = ..., group: _Optional[int] = ..., set: _Optional[_Union[SetBlocks, _Mapping]] = ..., fork: _Optional[_Union[ForkTable, _Mapping]] = ..., drop: _Optional[_Union[DropTable, _Mapping]] = ...) -> None: ...

class SetBlocks(_message.Message):
    __slots__ = ("first_block", "blocks", "fresh", "replace")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: Blocks
    fresh: _containers.RepeatedScalarFieldContainer[bool]
    replace: bool
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., fresh: _Optional[_Iterable[bool]] = ..., replace: bool = ...) -> None: ...

class ForkTable(_message.Message):
    __slots__ = ("parent_sequence_id", "num_blocks")
    PARENT_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_id: int
    num_blocks: int
    def __init__(self, parent_sequence_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class DropTable(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("group", "source", "destination")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    group: int
    source: BlockRef
    destination: BlockRef
    def __init__(self, group: _Optional[int] = ..., source: _Optional[_Union[BlockRef, _Mapping]] = ..., destination: _Optional[_Union[BlockRef, _Mapping]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("sequence_id", "first_position", "num_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    first_position: int
    num_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., first_position: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("pool_id", "shard_index", "epoch", "incarnation", "session_id", "plan_number", "plan_digest")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    shard_index: int
    epoch: int
    incarnation: int
    session_id: int
    plan_number: int
    plan_digest: bytes
    def __init__(self, pool_id: _Optional[str] = ..., shard_index: _Optional[int] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., session_id: _Optional[int] = ..., plan_number: _Optional[int] = ..., plan_digest: _Optional[bytes] = ...) -> None: ...

class Publication(_message.Message):
    __slots__ = ("block", "group", "tenant", "parent_hash", "hash", "token_ids")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    block: BlockRef
    group: int
    tenant: str
    parent_hash: bytes
    hash: bytes
    token_ids: bytes
    def __init__(self, block: _Optional[_Union[BlockRef, _Mapping]] = ..., group: _Optional[int] = ..., tenant: _Optional[str] = ..., parent_hash: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...
