from kvplane.v1 import types_pb2 as _types_pb2
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
    kinds: _containers.RepeatedScalarFieldContainer[TableChangeKind]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    first_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    parent_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    allocated: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, kinds: _Optional[_Iterable[_Union[TableChangeKind, str]]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., first_blocks: _Optional[_Iterable[int]] = ..., num_blocks: _Optional[_Iterable[int]] = ..., parent_sequence_ids: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., allocated: _Optional[_Iterable[bool]] = ...) -> None: ...

class Allocations(_message.Message):
    __slots__ = ("tiers", "indices", "generations", "groups")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Transfers(_message.Message):
    __slots__ = ("groups", "source_tiers", "source_indices", "source_generations", "destination_tiers", "destination_indices", "destination_generations")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TIERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_TIERS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_INDICES_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    source_tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    source_indices: _containers.RepeatedScalarFieldContainer[int]
    source_generations: _containers.RepeatedScalarFieldContainer[int]
    destination_tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    destination_indices: _containers.RepeatedScalarFieldContainer[int]
    destination_generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[int]] = ..., source_tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., source_indices: _Optional[_Iterable[int]] = ..., source_generations: _Optional[_Iterable[int]] = ..., destination_tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., destination_indices: _Optional[_Iterable[int]] = ..., destination_generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("sequence_ids", "first_positions", "num_tokens")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    first_positions: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., first_positions: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

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
    groups: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., pool_id: _Optional[str] = ..., shard_epochs: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

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
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    parent_indices: _containers.RepeatedScalarFieldContainer[int]
    parent_generations: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., parent_indices: _Optional[_Iterable[int]] = ..., parent_generations: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
