from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.wire.plane.v1 import plan_pb2 as _plan_pb2
from kvplane.wire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("hello", "report", "heartbeat", "fence_done", "files_forgotten")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FENCE_DONE_FIELD_NUMBER: _ClassVar[int]
    FILES_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: BlockReport
    heartbeat: Heartbeat
    fence_done: FenceDone
    files_forgotten: FilesForgotten
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[BlockReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fence_done: _Optional[_Union[FenceDone, _Mapping]] = ..., files_forgotten: _Optional[_Union[FilesForgotten, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("welcome", "report_accepted", "publish", "fence", "report_request", "withdraw", "forget_files")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    FORGET_FILES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    report_accepted: ReportAccepted
    publish: PublishBlocks
    fence: Fence
    report_request: ReportRequest
    withdraw: WithdrawBlocks
    forget_files: ForgetFiles
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., report_accepted: _Optional[_Union[ReportAccepted, _Mapping]] = ..., publish: _Optional[_Union[PublishBlocks, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., report_request: _Optional[_Union[ReportRequest, _Mapping]] = ..., withdraw: _Optional[_Union[WithdrawBlocks, _Mapping]] = ..., forget_files: _Optional[_Union[ForgetFiles, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("pool_id", "shard", "epoch", "layout", "num_device_blocks", "num_host_blocks", "address", "incarnation", "key_id", "groups", "has_file_tier", "version", "oldest_payload_version", "newest_payload_version")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HAS_FILE_TIER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PAYLOAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PAYLOAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    shard: _types_pb2.Shard
    epoch: int
    layout: _types_pb2.Layout
    num_device_blocks: int
    num_host_blocks: int
    address: str
    incarnation: int
    key_id: bytes
    groups: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    has_file_tier: bool
    version: str
    oldest_payload_version: int
    newest_payload_version: int
    def __init__(self, pool_id: _Optional[str] = ..., shard: _Optional[_Union[_types_pb2.Shard, _Mapping]] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., key_id: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., has_file_tier: bool = ..., version: _Optional[str] = ..., oldest_payload_version: _Optional[int] = ..., newest_payload_version: _Optional[int] = ...) -> None: ...

class GroupBlocks(_message.Message):
    __slots__ = ("num_device_blocks", "num_host_blocks")
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_device_blocks: int
    num_host_blocks: int
    def __init__(self, num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation", "resumed", "key", "heartbeat_interval", "version", "payload_version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    resumed: bool
    key: bytes
    heartbeat_interval: _duration_pb2.Duration
    version: str
    payload_version: int
    def __init__(self, incarnation: _Optional[int] = ..., resumed: bool = ..., key: _Optional[bytes] = ..., heartbeat_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., version: _Optional[str] = ..., payload_version: _Optional[int] = ...) -> None: ...

class BlockReport(_message.Message):
    __slots__ = ("blocks", "publications", "last")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Blocks]
    publications: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Publications]
    last: bool
    def __init__(self, blocks: _Optional[_Iterable[_Union[_types_pb2.Blocks, _Mapping]]] = ..., publications: _Optional[_Iterable[_Union[_plan_pb2.Publications, _Mapping]]] = ..., last: bool = ...) -> None: ...

class ReportAccepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishBlocks(_message.Message):
    __slots__ = ("publications",)
    PUBLICATIONS_FIELD_NUMBER: _ClassVar[int]
    publications: _plan_pb2.Publications
    def __init__(self, publications: _Optional[_Union[_plan_pb2.Publications, _Mapping]] = ...) -> None: ...

class WithdrawBlocks(_message.Message):
    __slots__ = ("indices", "generations", "group")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    indices: bytes
    generations: bytes
    group: int
    def __init__(self, indices: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., group: _Optional[int] = ...) -> None: ...

class ForgetFiles(_message.Message):
    __slots__ = ("forget_id", "tenant", "namespace", "token_ids", "all_namespaces", "all_tenants")
    FORGET_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    forget_id: int
    tenant: str
    namespace: str
    token_ids: bytes
    all_namespaces: bool
    all_tenants: bool
    def __init__(self, forget_id: _Optional[int] = ..., tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., all_namespaces: bool = ..., all_tenants: bool = ...) -> None: ...

class FilesForgotten(_message.Message):
    __slots__ = ("forget_id",)
    FORGET_ID_FIELD_NUMBER: _ClassVar[int]
    forget_id: int
    def __init__(self, forget_id: _Optional[int] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("session", "ordinal")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    ordinal: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ..., ordinal: _Optional[int] = ...) -> None: ...

class FenceDone(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionRef
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionRef, _Mapping]] = ...) -> None: ...
