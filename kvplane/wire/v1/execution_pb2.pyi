from kvplane.wire.v1 import local_pb2 as _local_pb2
from kvplane.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecuteRequest(_message.Message):
    __slots__ = ("open", "plan", "layer", "join", "share", "read", "write")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    open: OpenExecution
    plan: StartPlanRequest
    layer: RunLayerRequest
    join: _local_pb2.JoinExecution
    share: _local_pb2.ShareDeviceMemory
    read: ReadBlocksRequest
    write: WriteBlocksRequest
    def __init__(self, open: _Optional[_Union[OpenExecution, _Mapping]] = ..., plan: _Optional[_Union[StartPlanRequest, _Mapping]] = ..., layer: _Optional[_Union[RunLayerRequest, _Mapping]] = ..., join: _Optional[_Union[_local_pb2.JoinExecution, _Mapping]] = ..., share: _Optional[_Union[_local_pb2.ShareDeviceMemory, _Mapping]] = ..., read: _Optional[_Union[ReadBlocksRequest, _Mapping]] = ..., write: _Optional[_Union[WriteBlocksRequest, _Mapping]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("opened", "started", "output", "joined", "error", "read", "written")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    opened: ExecutionOpened
    started: StartPlanResponse
    output: RunLayerResponse
    joined: _local_pb2.ExecutionJoined
    error: _types_pb2.Error
    read: ReadBlocksResponse
    written: WriteBlocksResponse
    def __init__(self, opened: _Optional[_Union[ExecutionOpened, _Mapping]] = ..., started: _Optional[_Union[StartPlanResponse, _Mapping]] = ..., output: _Optional[_Union[RunLayerResponse, _Mapping]] = ..., joined: _Optional[_Union[_local_pb2.ExecutionJoined, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., read: _Optional[_Union[ReadBlocksResponse, _Mapping]] = ..., written: _Optional[_Union[WriteBlocksResponse, _Mapping]] = ...) -> None: ...

class OpenExecution(_message.Message):
    __slots__ = ("grant", "host_id")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.SignedPayload
    host_id: str
    def __init__(self, grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., host_id: _Optional[str] = ...) -> None: ...

class ExecutionOpened(_message.Message):
    __slots__ = ("layers", "local")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    local: _local_pb2.LocalOffer
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., local: _Optional[_Union[_local_pb2.LocalOffer, _Mapping]] = ...) -> None: ...

class StartPlanRequest(_message.Message):
    __slots__ = ("grant", "plan", "pass_index")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PASS_INDEX_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.SignedPayload
    plan: _types_pb2.SignedPayload
    pass_index: int
    def __init__(self, grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., pass_index: _Optional[int] = ...) -> None: ...

class StartPlanResponse(_message.Message):
    __slots__ = ("plan_number", "num_tokens", "finished", "receipt", "num_copied_blocks", "num_swapped_blocks")
    PLAN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    plan_number: int
    num_tokens: int
    finished: bool
    receipt: _types_pb2.SignedPayload
    num_copied_blocks: int
    num_swapped_blocks: int
    def __init__(self, plan_number: _Optional[int] = ..., num_tokens: _Optional[int] = ..., finished: bool = ..., receipt: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., num_copied_blocks: _Optional[int] = ..., num_swapped_blocks: _Optional[int] = ...) -> None: ...

class RunLayerRequest(_message.Message):
    __slots__ = ("grant", "plan", "layer", "query", "key", "value", "options", "output", "plan_number", "pass_index")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PLAN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PASS_INDEX_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.SignedPayload
    plan: _types_pb2.SignedPayload
    layer: int
    query: _types_pb2.Tensor
    key: _types_pb2.Tensor
    value: _types_pb2.Tensor
    options: AttentionOptions
    output: _types_pb2.MemoryRange
    plan_number: int
    pass_index: int
    def __init__(self, grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., layer: _Optional[int] = ..., query: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., key: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., options: _Optional[_Union[AttentionOptions, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.MemoryRange, _Mapping]] = ..., plan_number: _Optional[int] = ..., pass_index: _Optional[int] = ...) -> None: ...

class RunLayerResponse(_message.Message):
    __slots__ = ("layer", "output", "receipt")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    layer: int
    output: _types_pb2.Tensor
    receipt: _types_pb2.SignedPayload
    def __init__(self, layer: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., receipt: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ...) -> None: ...

class AttentionOptions(_message.Message):
    __slots__ = ("scale", "sliding_window_tokens", "alibi_slopes", "logit_soft_cap", "sinks", "block_pattern", "seen_blocks")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIBI_SLOPES_FIELD_NUMBER: _ClassVar[int]
    LOGIT_SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_PATTERN_FIELD_NUMBER: _ClassVar[int]
    SEEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    scale: float
    sliding_window_tokens: int
    alibi_slopes: _containers.RepeatedScalarFieldContainer[float]
    logit_soft_cap: float
    sinks: _containers.RepeatedScalarFieldContainer[float]
    block_pattern: _types_pb2.BlockPattern
    seen_blocks: _types_pb2.Tensor
    def __init__(self, scale: _Optional[float] = ..., sliding_window_tokens: _Optional[int] = ..., alibi_slopes: _Optional[_Iterable[float]] = ..., logit_soft_cap: _Optional[float] = ..., sinks: _Optional[_Iterable[float]] = ..., block_pattern: _Optional[_Union[_types_pb2.BlockPattern, _Mapping]] = ..., seen_blocks: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("grant", "sequence_id", "pin_grant", "group", "entries", "first_layer", "num_layers", "output", "keys")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_GRANT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.SignedPayload
    sequence_id: int
    pin_grant: _types_pb2.SignedPayload
    group: int
    entries: bytes
    first_layer: int
    num_layers: int
    output: _types_pb2.MemoryRange
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., sequence_id: _Optional[int] = ..., pin_grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., group: _Optional[int] = ..., entries: _Optional[bytes] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.MemoryRange, _Mapping]] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("blocks", "table", "num_bytes", "layout_fingerprint")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    blocks: _types_pb2.Tensor
    table: _types_pb2.Blocks
    num_bytes: bytes
    layout_fingerprint: bytes
    def __init__(self, blocks: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., table: _Optional[_Union[_types_pb2.Blocks, _Mapping]] = ..., num_bytes: _Optional[bytes] = ..., layout_fingerprint: _Optional[bytes] = ...) -> None: ...

class WriteBlocksRequest(_message.Message):
    __slots__ = ("grant", "plan", "group", "sequence_ids", "entries", "first_layer", "num_layers", "blocks", "num_bytes", "keys", "layout_fingerprint")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.SignedPayload
    plan: _types_pb2.SignedPayload
    group: int
    sequence_ids: bytes
    entries: bytes
    first_layer: int
    num_layers: int
    blocks: _types_pb2.Tensor
    num_bytes: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    layout_fingerprint: bytes
    def __init__(self, grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., group: _Optional[int] = ..., sequence_ids: _Optional[bytes] = ..., entries: _Optional[bytes] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., blocks: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., num_bytes: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., layout_fingerprint: _Optional[bytes] = ...) -> None: ...

class WriteBlocksResponse(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: _types_pb2.SignedPayload
    def __init__(self, receipt: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ...) -> None: ...

class LoadFileBlocksRequest(_message.Message):
    __slots__ = ("grant", "plan", "sequence_id", "token_ids")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.SignedPayload
    plan: _types_pb2.SignedPayload
    sequence_id: int
    token_ids: bytes
    def __init__(self, grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., sequence_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class LoadFileBlocksResponse(_message.Message):
    __slots__ = ("num_blocks", "receipt")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    receipt: _types_pb2.SignedPayload
    def __init__(self, num_blocks: _Optional[int] = ..., receipt: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ...) -> None: ...
