from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocalOffer(_message.Message):
    __slots__ = ("socket_path", "secret", "cuda_device_uuid")
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CUDA_DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    secret: bytes
    cuda_device_uuid: str
    def __init__(self, socket_path: _Optional[str] = ..., secret: _Optional[bytes] = ..., cuda_device_uuid: _Optional[str] = ...) -> None: ...

class JoinExecution(_message.Message):
    __slots__ = ("secret",)
    SECRET_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    def __init__(self, secret: _Optional[bytes] = ...) -> None: ...

class ShareDeviceMemory(_message.Message):
    __slots__ = ("cuda_device_uuid",)
    CUDA_DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    cuda_device_uuid: str
    def __init__(self, cuda_device_uuid: _Optional[str] = ...) -> None: ...

class ExecutionJoined(_message.Message):
    __slots__ = ("regions",)
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[MemoryRegion]
    def __init__(self, regions: _Optional[_Iterable[_Union[MemoryRegion, _Mapping]]] = ...) -> None: ...

class MemoryRegion(_message.Message):
    __slots__ = ("region_id", "size_bytes", "cuda_ipc_handle", "cuda_device_uuid")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CUDA_DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    size_bytes: int
    cuda_ipc_handle: bytes
    cuda_device_uuid: str
    def __init__(self, region_id: _Optional[int] = ..., size_bytes: _Optional[int] = ..., cuda_ipc_handle: _Optional[bytes] = ..., cuda_device_uuid: _Optional[str] = ...) -> None: ...
