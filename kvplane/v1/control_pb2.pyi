from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperationStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_STATUS_UNSPECIFIED: _ClassVar[OperationStatus]
    OPERATION_STATUS_OK: _ClassVar[OperationStatus]
    OPERATION_STATUS_LATER: _ClassVar[OperationStatus]
    OPERATION_STATUS_NEVER: _ClassVar[OperationStatus]
    OPERATION_STATUS_FAILED: _ClassVar[OperationStatus]
OPERATION_STATUS_UNSPECIFIED: OperationStatus
OPERATION_STATUS_OK: OperationStatus
OPERATION_STATUS_LATER: OperationStatus
OPERATION_STATUS_NEVER: OperationStatus
OPERATION_STATUS_FAILED: OperationStatus

class DescribeControlPlaneRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeControlPlaneResponse(_message.Message):
    __slots__ = ("protocol", "incarnation", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: _types_pb2.ProtocolRange
    incarnation: int
    version: str
    def __init__(self, protocol: _Optional[_Union[_types_pb2.ProtocolRange, _Mapping]] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pool_ids",)
    POOL_IDS_FIELD_NUMBER: _ClassVar[int]
    pool_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pool_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribePoolRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class DescribePoolResponse(_message.Message):
    __slots__ = ("layout", "shards", "ready", "usage", "num_sessions", "num_sequences", "counters")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    layout: _types_pb2.Layout
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    ready: bool
    usage: PoolUsage
    num_sessions: int
    num_sequences: int
    counters: PoolCounters
    def __init__(self, layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ..., ready: bool = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ..., num_sessions: _Optional[int] = ..., num_sequences: _Optional[int] = ..., counters: _Optional[_Union[PoolCounters, _Mapping]] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("shard", "epoch", "address", "connected")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    shard: _types_pb2.Shard
    epoch: int
    address: str
    connected: bool
    def __init__(self, shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., connected: bool = ...) -> None: ...

class PoolUsage(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierUsage]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierUsage, _Mapping]]] = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("tier", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_limbo_blocks", "num_reserved_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIMBO_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_limbo_blocks: int
    num_reserved_blocks: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_limbo_blocks: _Optional[int] = ..., num_reserved_blocks: _Optional[int] = ...) -> None: ...

class PoolCounters(_message.Message):
    __slots__ = ("num_lookup_tokens", "num_hit_tokens", "num_copies_on_write", "num_swapped_out_blocks", "num_swapped_in_blocks", "num_evictions", "num_publications", "max_held_blocks")
    NUM_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_ON_WRITE_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_lookup_tokens: int
    num_hit_tokens: int
    num_copies_on_write: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_evictions: int
    num_publications: int
    max_held_blocks: int
    def __init__(self, num_lookup_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ..., num_copies_on_write: _Optional[int] = ..., num_swapped_out_blocks: _Optional[int] = ..., num_swapped_in_blocks: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_publications: _Optional[int] = ..., max_held_blocks: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("pool_id", "protocol", "layout", "client_name")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    protocol: _types_pb2.ProtocolRange
    layout: _types_pb2.Layout
    client_name: str
    def __init__(self, pool_id: _Optional[str] = ..., protocol: _Optional[_Union[_types_pb2.ProtocolRange, _Mapping]] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., client_name: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "protocol_version", "time_to_live", "max_plans_in_flight", "grant", "shards", "layout", "num_device_blocks", "num_host_blocks", "incarnation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    protocol_version: int
    time_to_live: _duration_pb2.Duration
    max_plans_in_flight: int
    grant: _types_pb2.SignedPayload
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    layout: _types_pb2.Layout
    num_device_blocks: int
    num_host_blocks: int
    incarnation: int
    def __init__(self, session_id: _Optional[int] = ..., protocol_version: _Optional[int] = ..., time_to_live: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_plans_in_flight: _Optional[int] = ..., grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class RenewSessionResponse(_message.Message):
    __slots__ = ("time_to_live",)
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    time_to_live: _duration_pb2.Duration
    def __init__(self, time_to_live: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session_id", "number", "operations", "receipts", "late_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    LATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    late_tokens: _containers.RepeatedCompositeFieldContainer[LateTokens]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ..., late_tokens: _Optional[_Iterable[_Union[LateTokens, _Mapping]]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("number", "result", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    result: StepResult
    error: _types_pb2.Error
    def __init__(self, number: _Optional[int] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("results", "plan", "usage")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[OperationResult]
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, results: _Optional[_Iterable[_Union[OperationResult, _Mapping]]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class LateTokens(_message.Message):
    __slots__ = ("sequence_id", "first_position", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    first_position: int
    token_ids: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("admit", "append", "fork", "free", "swap_out", "swap_in")
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    admit: Admit
    append: Append
    fork: Fork
    free: Free
    swap_out: SwapOut
    swap_in: SwapIn
    def __init__(self, admit: _Optional[_Union[Admit, _Mapping]] = ..., append: _Optional[_Union[Append, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., free: _Optional[_Union[Free, _Mapping]] = ..., swap_out: _Optional[_Union[SwapOut, _Mapping]] = ..., swap_in: _Optional[_Union[SwapIn, _Mapping]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "num_compute_tokens", "max_total_tokens", "skip_prefix_lookup")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: bytes
    num_compute_tokens: int
    max_total_tokens: int
    skip_prefix_lookup: bool
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_compute_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., skip_prefix_lookup: bool = ...) -> None: ...

class Append(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "num_slots")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: bytes
    num_slots: int
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_slots: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("parent_sequence_id", "sequence_id")
    PARENT_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_id: int
    sequence_id: int
    def __init__(self, parent_sequence_id: _Optional[int] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class Free(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class SwapOut(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SwapIn(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OperationResult(_message.Message):
    __slots__ = ("status", "error", "shortage", "admit", "append", "fork", "free", "swap_out", "swap_in")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    status: OperationStatus
    error: _types_pb2.Error
    shortage: Shortage
    admit: AdmitResult
    append: AppendResult
    fork: ForkResult
    free: FreeResult
    swap_out: SwapOutResult
    swap_in: SwapInResult
    def __init__(self, status: _Optional[_Union[OperationStatus, str]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., shortage: _Optional[_Union[Shortage, _Mapping]] = ..., admit: _Optional[_Union[AdmitResult, _Mapping]] = ..., append: _Optional[_Union[AppendResult, _Mapping]] = ..., fork: _Optional[_Union[ForkResult, _Mapping]] = ..., free: _Optional[_Union[FreeResult, _Mapping]] = ..., swap_out: _Optional[_Union[SwapOutResult, _Mapping]] = ..., swap_in: _Optional[_Union[SwapInResult, _Mapping]] = ...) -> None: ...

class Shortage(_message.Message):
    __slots__ = ("tier", "num_blocks_needed", "num_blocks_available", "num_blocks_pending")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_PENDING_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    num_blocks_needed: int
    num_blocks_available: int
    num_blocks_pending: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., num_blocks_needed: _Optional[int] = ..., num_blocks_available: _Optional[int] = ..., num_blocks_pending: _Optional[int] = ...) -> None: ...

class AdmitResult(_message.Message):
    __slots__ = ("num_cached_tokens", "num_blocks", "num_scheduled_tokens")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_blocks: int
    num_scheduled_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ...) -> None: ...

class AppendResult(_message.Message):
    __slots__ = ("first_position", "num_blocks")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    num_blocks: int
    def __init__(self, first_position: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ForkResult(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class FreeResult(_message.Message):
    __slots__ = ("num_released_blocks",)
    NUM_RELEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_released_blocks: int
    def __init__(self, num_released_blocks: _Optional[int] = ...) -> None: ...

class SwapOutResult(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class SwapInResult(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("session_id", "number", "operation", "receipts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operation: Admit
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operation: _Optional[_Union[Admit, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("result", "plan", "usage")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    result: AdmitResult
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, result: _Optional[_Union[AdmitResult, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("session_id", "number", "operation", "receipts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operation: Append
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operation: _Optional[_Union[Append, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("result", "plan", "usage")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    result: AppendResult
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, result: _Optional[_Union[AppendResult, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session_id", "number", "operation", "receipts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operation: Fork
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operation: _Optional[_Union[Fork, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("result", "plan", "usage")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    result: ForkResult
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, result: _Optional[_Union[ForkResult, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("session_id", "number", "operation", "receipts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operation: Free
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operation: _Optional[_Union[Free, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("result", "plan", "usage")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    result: FreeResult
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, result: _Optional[_Union[FreeResult, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class SwapOutRequest(_message.Message):
    __slots__ = ("session_id", "number", "operation", "receipts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operation: SwapOut
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operation: _Optional[_Union[SwapOut, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ...) -> None: ...

class SwapOutResponse(_message.Message):
    __slots__ = ("result", "plan", "usage")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    result: SwapOutResult
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, result: _Optional[_Union[SwapOutResult, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class SwapInRequest(_message.Message):
    __slots__ = ("session_id", "number", "operation", "receipts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    operation: SwapIn
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ..., operation: _Optional[_Union[SwapIn, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ...) -> None: ...

class SwapInResponse(_message.Message):
    __slots__ = ("result", "plan", "usage")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    result: SwapInResult
    plan: _types_pb2.SignedPayload
    usage: PoolUsage
    def __init__(self, result: _Optional[_Union[SwapInResult, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class SubmitReceiptsRequest(_message.Message):
    __slots__ = ("session_id", "receipts", "late_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    LATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    late_tokens: _containers.RepeatedCompositeFieldContainer[LateTokens]
    def __init__(self, session_id: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ..., late_tokens: _Optional[_Iterable[_Union[LateTokens, _Mapping]]] = ...) -> None: ...

class SubmitReceiptsResponse(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: PoolUsage
    def __init__(self, usage: _Optional[_Union[PoolUsage, _Mapping]] = ...) -> None: ...

class AbortPlanRequest(_message.Message):
    __slots__ = ("session_id", "plan_number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    plan_number: int
    def __init__(self, session_id: _Optional[int] = ..., plan_number: _Optional[int] = ...) -> None: ...

class AbortPlanResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceState]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceState, _Mapping]]] = ...) -> None: ...

class ResyncRequest(_message.Message):
    __slots__ = ("session_id", "number")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    number: int
    def __init__(self, session_id: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ResyncResponse(_message.Message):
    __slots__ = ("sequences", "plan")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceState]
    plan: _types_pb2.SignedPayload
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceState, _Mapping]]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ...) -> None: ...

class GetBlockTableRequest(_message.Message):
    __slots__ = ("session_id", "sequence_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence_id: int
    def __init__(self, session_id: _Optional[int] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class GetBlockTableResponse(_message.Message):
    __slots__ = ("tables", "num_tokens")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[_types_pb2.Blocks]
    num_tokens: int
    def __init__(self, tables: _Optional[_Iterable[_Union[_types_pb2.Blocks, _Mapping]]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("session_id", "token_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    token_ids: bytes
    def __init__(self, session_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ("num_cached_tokens", "hashes")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, num_cached_tokens: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DescribeSequenceRequest(_message.Message):
    __slots__ = ("session_id", "sequence_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence_id: int
    def __init__(self, session_id: _Optional[int] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class DescribeSequenceResponse(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceState
    def __init__(self, sequence: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("sequence_id", "num_tokens", "num_scheduled_tokens", "num_written_tokens", "num_cached_tokens", "num_blocks", "tier")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_tokens: int
    num_scheduled_tokens: int
    num_written_tokens: int
    num_cached_tokens: int
    num_blocks: int
    tier: _types_pb2.Tier
    def __init__(self, sequence_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., num_written_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("hello", "report", "heartbeat", "fence_done")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FENCE_DONE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: BlockReport
    heartbeat: Heartbeat
    fence_done: FenceDone
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[BlockReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fence_done: _Optional[_Union[FenceDone, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("welcome", "report_accepted", "publish", "fence")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    report_accepted: ReportAccepted
    publish: PublishBlocks
    fence: Fence
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., report_accepted: _Optional[_Union[ReportAccepted, _Mapping]] = ..., publish: _Optional[_Union[PublishBlocks, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "pool_id", "shard", "epoch", "layout", "num_device_blocks", "num_host_blocks", "address", "incarnation")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol: _types_pb2.ProtocolRange
    pool_id: str
    shard: _types_pb2.Shard
    epoch: int
    layout: _types_pb2.Layout
    num_device_blocks: int
    num_host_blocks: int
    address: str
    incarnation: int
    def __init__(self, protocol: _Optional[_Union[_types_pb2.ProtocolRange, _Mapping]] = ..., pool_id: _Optional[str] = ..., shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "resumed", "key", "heartbeat_interval")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: int
    resumed: bool
    key: bytes
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., resumed: bool = ..., key: _Optional[bytes] = ..., heartbeat_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class BlockReport(_message.Message):
    __slots__ = ("blocks", "last", "max_session_id")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ReportedBlock]
    last: bool
    max_session_id: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[ReportedBlock, _Mapping]]] = ..., last: bool = ..., max_session_id: _Optional[int] = ...) -> None: ...

class ReportedBlock(_message.Message):
    __slots__ = ("block", "publication")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PUBLICATION_FIELD_NUMBER: _ClassVar[int]
    block: _types_pb2.BlockRef
    publication: _types_pb2.Publication
    def __init__(self, block: _Optional[_Union[_types_pb2.BlockRef, _Mapping]] = ..., publication: _Optional[_Union[_types_pb2.Publication, _Mapping]] = ...) -> None: ...

class ReportAccepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishBlocks(_message.Message):
    __slots__ = ("publications",)
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    publications: _containers.RepeatedCompositeFieldContainer[_types_pb2.Publication]
    def __init__(self, publications: _Optional[_Iterable[_Union[_types_pb2.Publication, _Mapping]]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class FenceDone(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...
