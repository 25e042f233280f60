from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "incarnation", "pool_id", "shard", "device")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    version: str
    incarnation: int
    pool_id: str
    shard: _types_pb2.ShardInfo
    device: str
    def __init__(self, version: _Optional[str] = ..., incarnation: _Optional[int] = ..., pool_id: _Optional[str] = ..., shard: _Optional[_Union[_types_pb2.ShardInfo, _Mapping]] = ..., device: _Optional[str] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pool_ids", "next_page_token")
    POOL_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool_ids: _containers.RepeatedScalarFieldContainer[str]
    next_page_token: str
    def __init__(self, pool_ids: _Optional[_Iterable[str]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("layout", "shards", "ready", "usage")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    layout: _types_pb2.Layout
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardInfo]
    ready: bool
    usage: _containers.RepeatedCompositeFieldContainer[_types_pb2.TierUsage]
    def __init__(self, layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.ShardInfo, _Mapping]]] = ..., ready: bool = ..., usage: _Optional[_Iterable[_Union[_types_pb2.TierUsage, _Mapping]]] = ...) -> None: ...

class GetPoolCountersRequest(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class GetPoolCountersResponse(_message.Message):
    __slots__ = ("counters",)
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    counters: _containers.ScalarMap[str, int]
    def __init__(self, counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("pool_id", "page_size", "page_token")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    page_size: int
    page_token: str
    def __init__(self, pool_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session", "client_name", "namespace", "num_sequences", "num_held_blocks", "num_plans_in_flight", "last_number", "time_to_live")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    client_name: str
    namespace: str
    num_sequences: int
    num_held_blocks: int
    num_plans_in_flight: int
    last_number: int
    time_to_live: _duration_pb2.Duration
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., client_name: _Optional[str] = ..., namespace: _Optional[str] = ..., num_sequences: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_plans_in_flight: _Optional[int] = ..., last_number: _Optional[int] = ..., time_to_live: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
