from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CutReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CUT_REASON_UNSPECIFIED: _ClassVar[CutReason]
    CUT_REASON_GROWTH: _ClassVar[CutReason]
    CUT_REASON_TURN: _ClassVar[CutReason]
    CUT_REASON_QUOTA: _ClassVar[CutReason]
    CUT_REASON_IDLE: _ClassVar[CutReason]
    CUT_REASON_IMPOSSIBLE: _ClassVar[CutReason]

class ItemStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_STATUS_UNSPECIFIED: _ClassVar[ItemStatus]
    ITEM_STATUS_LATER: _ClassVar[ItemStatus]
    ITEM_STATUS_NEVER: _ClassVar[ItemStatus]
    ITEM_STATUS_FAILED: _ClassVar[ItemStatus]

class ShortageReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHORTAGE_REASON_UNSPECIFIED: _ClassVar[ShortageReason]
    SHORTAGE_REASON_BLOCKS: _ClassVar[ShortageReason]
    SHORTAGE_REASON_HEADROOM: _ClassVar[ShortageReason]
    SHORTAGE_REASON_QUEUE: _ClassVar[ShortageReason]
    SHORTAGE_REASON_GROWTH: _ClassVar[ShortageReason]
    SHORTAGE_REASON_QUOTA: _ClassVar[ShortageReason]
CUT_REASON_UNSPECIFIED: CutReason
CUT_REASON_GROWTH: CutReason
CUT_REASON_TURN: CutReason
CUT_REASON_QUOTA: CutReason
CUT_REASON_IDLE: CutReason
CUT_REASON_IMPOSSIBLE: CutReason
ITEM_STATUS_UNSPECIFIED: ItemStatus
ITEM_STATUS_LATER: ItemStatus
ITEM_STATUS_NEVER: ItemStatus
ITEM_STATUS_FAILED: ItemStatus
SHORTAGE_REASON_UNSPECIFIED: ShortageReason
SHORTAGE_REASON_BLOCKS: ShortageReason
SHORTAGE_REASON_HEADROOM: ShortageReason
SHORTAGE_REASON_QUEUE: ShortageReason
SHORTAGE_REASON_GROWTH: ShortageReason
SHORTAGE_REASON_QUOTA: ShortageReason

class OpenSessionRequest(_message.Message):
    __slots__ = ("pool_id", "layout", "client_name", "namespace")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    layout: _types_pb2.Layout
    client_name: str
    namespace: str
    def __init__(self, pool_id: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., client_name: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "time_to_live", "max_plans_in_flight", "grant", "shards")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    time_to_live: _duration_pb2.Duration
    max_plans_in_flight: int
    grant: _types_pb2.SignedPayload
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardInfo]
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., time_to_live: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_plans_in_flight: _Optional[int] = ..., grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.ShardInfo, _Mapping]]] = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ...) -> None: ...

class RenewSessionResponse(_message.Message):
    __slots__ = ("time_to_live",)
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    time_to_live: _duration_pb2.Duration
    def __init__(self, time_to_live: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session", "number", "operations", "receipts", "deferred_tokens", "traceparent", "validate_only")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    number: int
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    deferred_tokens: DeferredTokens
    traceparent: str
    validate_only: bool
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., number: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ..., deferred_tokens: _Optional[_Union[DeferredTokens, _Mapping]] = ..., traceparent: _Optional[str] = ..., validate_only: bool = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("results", "plan", "usage", "revision", "news")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[OperationResult]
    plan: _types_pb2.SignedPayload
    usage: _containers.RepeatedCompositeFieldContainer[_types_pb2.TierUsage]
    revision: int
    news: News
    def __init__(self, results: _Optional[_Iterable[_Union[OperationResult, _Mapping]]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., usage: _Optional[_Iterable[_Union[_types_pb2.TierUsage, _Mapping]]] = ..., revision: _Optional[int] = ..., news: _Optional[_Union[News, _Mapping]] = ...) -> None: ...

class StreamStepsRequest(_message.Message):
    __slots__ = ("step", "abort")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    step: StepRequest
    abort: AbortPlansRequest
    def __init__(self, step: _Optional[_Union[StepRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortPlansRequest, _Mapping]] = ...) -> None: ...

class StreamStepsResponse(_message.Message):
    __slots__ = ("number", "step", "abort", "error", "news")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: StepResponse
    abort: AbortPlansResponse
    error: _types_pb2.Error
    news: News
    def __init__(self, number: _Optional[int] = ..., step: _Optional[_Union[StepResponse, _Mapping]] = ..., abort: _Optional[_Union[AbortPlansResponse, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., news: _Optional[_Union[News, _Mapping]] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("granted_sequence_ids", "granted_num_cached_tokens", "granted_num_blocks", "cut_sequence_ids", "cut_reasons", "num_blocks_asked", "asked_within", "asked_sequence_ids", "as_of_number")
    GRANTED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CUT_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    CUT_REASONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_ASKED_FIELD_NUMBER: _ClassVar[int]
    ASKED_WITHIN_FIELD_NUMBER: _ClassVar[int]
    ASKED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_NUMBER_FIELD_NUMBER: _ClassVar[int]
    granted_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    granted_num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    granted_num_blocks: _containers.RepeatedScalarFieldContainer[int]
    cut_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    cut_reasons: _containers.RepeatedScalarFieldContainer[CutReason]
    num_blocks_asked: int
    asked_within: _duration_pb2.Duration
    asked_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    as_of_number: int
    def __init__(self, granted_sequence_ids: _Optional[_Iterable[int]] = ..., granted_num_cached_tokens: _Optional[_Iterable[int]] = ..., granted_num_blocks: _Optional[_Iterable[int]] = ..., cut_sequence_ids: _Optional[_Iterable[int]] = ..., cut_reasons: _Optional[_Iterable[_Union[CutReason, str]]] = ..., num_blocks_asked: _Optional[int] = ..., asked_within: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., asked_sequence_ids: _Optional[_Iterable[int]] = ..., as_of_number: _Optional[int] = ...) -> None: ...

class DeferredTokens(_message.Message):
    __slots__ = ("sequence_ids", "admitted_by", "first_positions", "num_tokens", "token_ids")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BY_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    admitted_by: _containers.RepeatedScalarFieldContainer[int]
    first_positions: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., admitted_by: _Optional[_Iterable[int]] = ..., first_positions: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("admit", "append", "fork", "free", "swap", "truncate", "pin", "unpin")
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    admit: Admit
    append: Append
    fork: Fork
    free: Free
    swap: Swap
    truncate: Truncate
    pin: Pin
    unpin: Unpin
    def __init__(self, admit: _Optional[_Union[Admit, _Mapping]] = ..., append: _Optional[_Union[Append, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., free: _Optional[_Union[Free, _Mapping]] = ..., swap: _Optional[_Union[Swap, _Mapping]] = ..., truncate: _Optional[_Union[Truncate, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., unpin: _Optional[_Union[Unpin, _Mapping]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "num_compute_tokens", "max_total_tokens", "skip_prefix_lookup", "fork_sequence_ids", "wait", "ends_with_plan", "checkpoint_position")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    FORK_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    ENDS_WITH_PLAN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_compute_tokens: int
    max_total_tokens: int
    skip_prefix_lookup: bool
    fork_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    wait: bool
    ends_with_plan: bool
    checkpoint_position: int
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_compute_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., skip_prefix_lookup: bool = ..., fork_sequence_ids: _Optional[_Iterable[int]] = ..., wait: bool = ..., ends_with_plan: bool = ..., checkpoint_position: _Optional[int] = ...) -> None: ...

class Append(_message.Message):
    __slots__ = ("sequence_ids", "first_positions", "num_slots", "num_tokens", "token_ids", "num_lookahead_slots", "checkpoint_positions")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    first_positions: _containers.RepeatedScalarFieldContainer[int]
    num_slots: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_lookahead_slots: _containers.RepeatedScalarFieldContainer[int]
    checkpoint_positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., first_positions: _Optional[_Iterable[int]] = ..., num_slots: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_lookahead_slots: _Optional[_Iterable[int]] = ..., checkpoint_positions: _Optional[_Iterable[int]] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("parent_sequence_ids", "sequence_ids")
    PARENT_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parent_sequence_ids: _Optional[_Iterable[int]] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Free(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Swap(_message.Message):
    __slots__ = ("sequence_ids", "tier")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    tier: _types_pb2.Tier
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ...) -> None: ...

class Truncate(_message.Message):
    __slots__ = ("sequence_ids", "num_tokens")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("pin_ids", "num_tokens", "token_ids")
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    pin_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pin_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Unpin(_message.Message):
    __slots__ = ("pin_ids",)
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    pin_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pin_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OperationResult(_message.Message):
    __slots__ = ("failures", "admit", "num_table_blocks", "num_released_blocks", "num_swapped_blocks", "num_pinned_blocks", "pin_grant", "checkpoint_positions")
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    NUM_TABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PIN_GRANT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[ItemFailure]
    admit: AdmitResult
    num_table_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_released_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_swapped_blocks: int
    num_pinned_blocks: _containers.RepeatedScalarFieldContainer[int]
    pin_grant: _types_pb2.SignedPayload
    checkpoint_positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, failures: _Optional[_Iterable[_Union[ItemFailure, _Mapping]]] = ..., admit: _Optional[_Union[AdmitResult, _Mapping]] = ..., num_table_blocks: _Optional[_Iterable[int]] = ..., num_released_blocks: _Optional[_Iterable[int]] = ..., num_swapped_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[_Iterable[int]] = ..., pin_grant: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ..., checkpoint_positions: _Optional[_Iterable[int]] = ...) -> None: ...

class AdmitResult(_message.Message):
    __slots__ = ("num_cached_tokens", "num_blocks", "num_scheduled_tokens")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_blocks: int
    num_scheduled_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ...) -> None: ...

class ItemFailure(_message.Message):
    __slots__ = ("item", "status", "error", "shortage")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    item: int
    status: ItemStatus
    error: _types_pb2.Error
    shortage: Shortage
    def __init__(self, item: _Optional[int] = ..., status: _Optional[_Union[ItemStatus, str]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., shortage: _Optional[_Union[Shortage, _Mapping]] = ...) -> None: ...

class Shortage(_message.Message):
    __slots__ = ("tier", "num_blocks_needed", "num_blocks_available", "num_blocks_pending", "reason", "queue_position", "retry_delay")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_PENDING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    num_blocks_needed: int
    num_blocks_available: int
    num_blocks_pending: int
    reason: ShortageReason
    queue_position: int
    retry_delay: _duration_pb2.Duration
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., num_blocks_needed: _Optional[int] = ..., num_blocks_available: _Optional[int] = ..., num_blocks_pending: _Optional[int] = ..., reason: _Optional[_Union[ShortageReason, str]] = ..., queue_position: _Optional[int] = ..., retry_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AbortPlansRequest(_message.Message):
    __slots__ = ("session", "number", "receipts", "plan_number", "whole_tables")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TABLES_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    number: int
    receipts: _containers.RepeatedCompositeFieldContainer[_types_pb2.SignedPayload]
    plan_number: int
    whole_tables: bool
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., number: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[_types_pb2.SignedPayload, _Mapping]]] = ..., plan_number: _Optional[int] = ..., whole_tables: bool = ...) -> None: ...

class AbortPlansResponse(_message.Message):
    __slots__ = ("sequences", "plan")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    sequences: SequenceStates
    plan: _types_pb2.SignedPayload
    def __init__(self, sequences: _Optional[_Union[SequenceStates, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.SignedPayload, _Mapping]] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("session", "sequence_ids", "with_tables", "page_size", "page_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    WITH_TABLES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    with_tables: bool
    page_size: int
    page_token: str
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., with_tables: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "tables", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: SequenceStates
    tables: _containers.RepeatedCompositeFieldContainer[_types_pb2.Blocks]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Union[SequenceStates, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[_types_pb2.Blocks, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SequenceStates(_message.Message):
    __slots__ = ("sequence_ids", "admitted_by", "num_tokens", "num_scheduled_tokens", "num_written_tokens", "num_cached_tokens", "num_blocks", "tiers", "num_awaited_blocks", "checkpoint_positions")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_AWAITED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    admitted_by: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_scheduled_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_written_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    num_awaited_blocks: _containers.RepeatedScalarFieldContainer[int]
    checkpoint_positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., admitted_by: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_scheduled_tokens: _Optional[_Iterable[int]] = ..., num_written_tokens: _Optional[_Iterable[int]] = ..., num_cached_tokens: _Optional[_Iterable[int]] = ..., num_blocks: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., num_awaited_blocks: _Optional[_Iterable[int]] = ..., checkpoint_positions: _Optional[_Iterable[int]] = ...) -> None: ...
