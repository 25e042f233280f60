from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefixEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_EVENT_KIND_UNSPECIFIED: _ClassVar[PrefixEventKind]
    PREFIX_EVENT_KIND_STORED: _ClassVar[PrefixEventKind]
    PREFIX_EVENT_KIND_REMOVED: _ClassVar[PrefixEventKind]
    PREFIX_EVENT_KIND_CLEARED: _ClassVar[PrefixEventKind]

class ForgetScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORGET_SCOPE_UNSPECIFIED: _ClassVar[ForgetScope]
    FORGET_SCOPE_PREFIX: _ClassVar[ForgetScope]
    FORGET_SCOPE_NAMESPACE: _ClassVar[ForgetScope]
    FORGET_SCOPE_TENANT: _ClassVar[ForgetScope]
PREFIX_EVENT_KIND_UNSPECIFIED: PrefixEventKind
PREFIX_EVENT_KIND_STORED: PrefixEventKind
PREFIX_EVENT_KIND_REMOVED: PrefixEventKind
PREFIX_EVENT_KIND_CLEARED: PrefixEventKind
FORGET_SCOPE_UNSPECIFIED: ForgetScope
FORGET_SCOPE_PREFIX: ForgetScope
FORGET_SCOPE_NAMESPACE: ForgetScope
FORGET_SCOPE_TENANT: ForgetScope

class FindPrefixRequest(_message.Message):
    __slots__ = ("token_ids", "hashes", "namespace", "pool_ids", "with_blocks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POOL_IDS_FIELD_NUMBER: _ClassVar[int]
    WITH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    namespace: str
    pool_ids: _containers.RepeatedScalarFieldContainer[str]
    with_blocks: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., namespace: _Optional[str] = ..., pool_ids: _Optional[_Iterable[str]] = ..., with_blocks: bool = ...) -> None: ...

class FindPrefixResponse(_message.Message):
    __slots__ = ("matches",)
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[PoolMatch]
    def __init__(self, matches: _Optional[_Iterable[_Union[PoolMatch, _Mapping]]] = ...) -> None: ...

class PoolMatch(_message.Message):
    __slots__ = ("pool_id", "num_device_tokens", "num_host_tokens", "revision", "blocks")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    num_device_tokens: int
    num_host_tokens: int
    revision: int
    blocks: PrefixBlocks
    def __init__(self, pool_id: _Optional[str] = ..., num_device_tokens: _Optional[int] = ..., num_host_tokens: _Optional[int] = ..., revision: _Optional[int] = ..., blocks: _Optional[_Union[PrefixBlocks, _Mapping]] = ...) -> None: ...

class PrefixBlocks(_message.Message):
    __slots__ = ("hashes", "tiers", "indices", "generations", "ref_counts", "num_hits", "ages_ms", "idle_ms", "priorities")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    AGES_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    ref_counts: _containers.RepeatedScalarFieldContainer[int]
    num_hits: _containers.RepeatedScalarFieldContainer[int]
    ages_ms: _containers.RepeatedScalarFieldContainer[int]
    idle_ms: _containers.RepeatedScalarFieldContainer[int]
    priorities: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hashes: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., ref_counts: _Optional[_Iterable[int]] = ..., num_hits: _Optional[_Iterable[int]] = ..., ages_ms: _Optional[_Iterable[int]] = ..., idle_ms: _Optional[_Iterable[int]] = ..., priorities: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchPrefixesRequest(_message.Message):
    __slots__ = ("pool_id", "namespace", "since_revision", "incarnation")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SINCE_REVISION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    namespace: str
    since_revision: int
    incarnation: int
    def __init__(self, pool_id: _Optional[str] = ..., namespace: _Optional[str] = ..., since_revision: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class WatchPrefixesResponse(_message.Message):
    __slots__ = ("incarnation", "events", "revision")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    events: _containers.RepeatedCompositeFieldContainer[PrefixEvent]
    revision: int
    def __init__(self, incarnation: _Optional[int] = ..., events: _Optional[_Iterable[_Union[PrefixEvent, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class PrefixEvent(_message.Message):
    __slots__ = ("kind", "hashes", "tiers", "parent_hashes", "token_ids")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    kind: PrefixEventKind
    hashes: bytes
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Tier]
    parent_hashes: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[PrefixEventKind, str]] = ..., hashes: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Tier, str]]] = ..., parent_hashes: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RetainPrefixRequest(_message.Message):
    __slots__ = ("pool_id", "namespace", "token_ids", "time_to_live", "priority")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    namespace: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    time_to_live: _duration_pb2.Duration
    priority: int
    def __init__(self, pool_id: _Optional[str] = ..., namespace: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., time_to_live: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class RetainPrefixResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ForgetPrefixesRequest(_message.Message):
    __slots__ = ("pool_id", "namespace", "scope", "token_ids", "force")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    namespace: str
    scope: ForgetScope
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    force: bool
    def __init__(self, pool_id: _Optional[str] = ..., namespace: _Optional[str] = ..., scope: _Optional[_Union[ForgetScope, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., force: bool = ...) -> None: ...

class ForgetPrefixesResponse(_message.Message):
    __slots__ = ("num_forgotten_blocks", "num_blocks_in_use")
    NUM_FORGOTTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    num_forgotten_blocks: int
    num_blocks_in_use: int
    def __init__(self, num_forgotten_blocks: _Optional[int] = ..., num_blocks_in_use: _Optional[int] = ...) -> None: ...
