from kvplane.wire.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
