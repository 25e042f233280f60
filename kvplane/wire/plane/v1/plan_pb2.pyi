from kvplane.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TableChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TABLE_CHANGE_KIND_UNSPECIFIED: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_SET: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_REPLACE: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_FORK: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_DROP: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_TRUNCATE: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_TRIM: _ClassVar[TableChangeKind]
    TABLE_CHANGE_KIND_KEEP: _ClassVar[TableChangeKind]
TABLE_CHANGE_KIND_UNSPECIFIED: TableChangeKind
TABLE_CHANGE_KIND_SET: TableChangeKind
TABLE_CHANGE_KIND_REPLACE: TableChangeKind
TABLE_CHANGE_KIND_FORK: TableChangeKind
TABLE_CHANGE_KIND_DROP: TableChangeKind
TABLE_CHANGE_KIND_TRUNCATE: TableChangeKind
TABLE_CHANGE_KIND_TRIM: TableChangeKind
TABLE_CHANGE_KIND_KEEP: TableChangeKind

class SessionGrant(_message.Message):
    __slots__ = ("version", "session", "ordinal", "pool_id", "shard_epochs", "tenant", "layout_fingerprint", "max_plans_in_flight", "namespace")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: _types_pb2.SessionRef
    ordinal: int
    pool_id: str
    shard_epochs: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    layout_fingerprint: bytes
    max_plans_in_flight: int
    namespace: str
    def __init__(self, version: _Optional[int] = ..., session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., ordinal: _Optional[int] = ..., pool_id: _Optional[str] = ..., shard_epochs: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., layout_fingerprint: _Optional[bytes] = ..., max_plans_in_flight: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("version", "session", "pool_id", "shard_epochs", "number", "previous", "resync", "changes", "transfers", "spans", "allocations", "traceparent", "finished", "skips_files")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FILES_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: _types_pb2.SessionRef
    pool_id: str
    shard_epochs: _containers.RepeatedScalarFieldContainer[int]
    number: int
    previous: int
    resync: bool
    changes: TableChanges
    transfers: Transfers
    spans: Spans
    allocations: Allocations
    traceparent: str
    finished: int
    skips_files: bool
    def __init__(self, version: _Optional[int] = ..., session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., pool_id: _Optional[str] = ..., shard_epochs: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ..., previous: _Optional[int] = ..., resync: bool = ..., changes: _Optional[_Union[TableChanges, _Mapping]] = ..., transfers: _Optional[_Union[Transfers, _Mapping]] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ..., allocations: _Optional[_Union[Allocations, _Mapping]] = ..., traceparent: _Optional[str] = ..., finished: _Optional[int] = ..., skips_files: bool = ...) -> None: ...

class TableChanges(_message.Message):
    __slots__ = ("kinds", "sequence_ids", "groups", "tiers", "first_blocks", "num_blocks", "parent_sequence_ids", "indices", "generations", "allocated")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARENT_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    kinds: bytes
    sequence_ids: bytes
    groups: bytes
    tiers: bytes
    first_blocks: bytes
    num_blocks: bytes
    parent_sequence_ids: bytes
    indices: bytes
    generations: bytes
    allocated: bytes
    def __init__(self, kinds: _Optional[bytes] = ..., sequence_ids: _Optional[bytes] = ..., groups: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., first_blocks: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., parent_sequence_ids: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., allocated: _Optional[bytes] = ...) -> None: ...

class Allocations(_message.Message):
    __slots__ = ("tiers", "indices", "generations", "groups")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    tiers: bytes
    indices: bytes
    generations: bytes
    groups: bytes
    def __init__(self, tiers: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., groups: _Optional[bytes] = ...) -> None: ...

class Transfers(_message.Message):
    __slots__ = ("groups", "source_tiers", "source_indices", "source_generations", "destination_tiers", "destination_indices", "destination_generations")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TIERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_TIERS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_INDICES_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    groups: bytes
    source_tiers: bytes
    source_indices: bytes
    source_generations: bytes
    destination_tiers: bytes
    destination_indices: bytes
    destination_generations: bytes
    def __init__(self, groups: _Optional[bytes] = ..., source_tiers: _Optional[bytes] = ..., source_indices: _Optional[bytes] = ..., source_generations: _Optional[bytes] = ..., destination_tiers: _Optional[bytes] = ..., destination_indices: _Optional[bytes] = ..., destination_generations: _Optional[bytes] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("sequence_ids", "first_positions", "num_tokens")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    first_positions: bytes
    num_tokens: bytes
    def __init__(self, sequence_ids: _Optional[bytes] = ..., first_positions: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ...) -> None: ...

class PinGrant(_message.Message):
    __slots__ = ("version", "session", "pool_id", "shard_epochs", "groups", "tiers", "indices", "generations")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: _types_pb2.SessionRef
    pool_id: str
    shard_epochs: _containers.RepeatedScalarFieldContainer[int]
    groups: bytes
    tiers: bytes
    indices: bytes
    generations: bytes
    def __init__(self, version: _Optional[int] = ..., session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., pool_id: _Optional[str] = ..., shard_epochs: _Optional[_Iterable[int]] = ..., groups: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("version", "session", "pool_id", "shard_index", "epoch", "plan_number", "plan_digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: _types_pb2.SessionRef
    pool_id: str
    shard_index: int
    epoch: int
    plan_number: int
    plan_digest: bytes
    def __init__(self, version: _Optional[int] = ..., session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., pool_id: _Optional[str] = ..., shard_index: _Optional[int] = ..., epoch: _Optional[int] = ..., plan_number: _Optional[int] = ..., plan_digest: _Optional[bytes] = ...) -> None: ...

class Publications(_message.Message):
    __slots__ = ("group", "tenant", "namespace", "hash_algorithm", "indices", "generations", "parent_indices", "parent_generations", "hashes", "token_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PARENT_INDICES_FIELD_NUMBER: _ClassVar[int]
    PARENT_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tenant: str
    namespace: str
    hash_algorithm: str
    indices: bytes
    generations: bytes
    parent_indices: bytes
    parent_generations: bytes
    hashes: bytes
    token_ids: bytes
    def __init__(self, group: _Optional[int] = ..., tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., indices: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., parent_indices: _Optional[bytes] = ..., parent_generations: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...
