from kvplane.v1 import types_pb2 as _types_pb2
from kvplane.wire.v1 import types_pb2 as _types_pb2_1
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReceiveBlocksRequest(_message.Message):
    __slots__ = ("grant", "plan", "sequence_id")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2_1.SignedPayload
    plan: _types_pb2_1.SignedPayload
    sequence_id: int
    def __init__(self, grant: _Optional[_Union[_types_pb2_1.SignedPayload, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2_1.SignedPayload, _Mapping]] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class ReceiveBlocksResponse(_message.Message):
    __slots__ = ("ticket", "receipt")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ticket: PushTicket
    receipt: _types_pb2_1.SignedPayload
    def __init__(self, ticket: _Optional[_Union[PushTicket, _Mapping]] = ..., receipt: _Optional[_Union[_types_pb2_1.SignedPayload, _Mapping]] = ...) -> None: ...

class PushTicket(_message.Message):
    __slots__ = ("address", "secret", "first_block", "num_blocks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    address: str
    secret: bytes
    first_block: int
    num_blocks: int
    def __init__(self, address: _Optional[str] = ..., secret: _Optional[bytes] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class SendBlocksRequest(_message.Message):
    __slots__ = ("grant", "sequence_id", "ticket")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2_1.SignedPayload
    sequence_id: int
    ticket: PushTicket
    def __init__(self, grant: _Optional[_Union[_types_pb2_1.SignedPayload, _Mapping]] = ..., sequence_id: _Optional[int] = ..., ticket: _Optional[_Union[PushTicket, _Mapping]] = ...) -> None: ...

class SendBlocksResponse(_message.Message):
    __slots__ = ("num_bytes", "receipt")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    receipt: _types_pb2_1.SignedPayload
    def __init__(self, num_bytes: _Optional[int] = ..., receipt: _Optional[_Union[_types_pb2_1.SignedPayload, _Mapping]] = ...) -> None: ...

class PushBlocksRequest(_message.Message):
    __slots__ = ("open", "chunk")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    open: OpenPush
    chunk: BlockChunk
    def __init__(self, open: _Optional[_Union[OpenPush, _Mapping]] = ..., chunk: _Optional[_Union[BlockChunk, _Mapping]] = ...) -> None: ...

class OpenPush(_message.Message):
    __slots__ = ("secret", "layout_fingerprint", "shard")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    layout_fingerprint: bytes
    shard: _types_pb2_1.Shard
    def __init__(self, secret: _Optional[bytes] = ..., layout_fingerprint: _Optional[bytes] = ..., shard: _Optional[_Union[_types_pb2_1.Shard, _Mapping]] = ...) -> None: ...

class BlockChunk(_message.Message):
    __slots__ = ("group", "first_layer", "num_layers", "first_block", "num_blocks", "data", "checksum")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    group: int
    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int
    data: bytes
    checksum: int
    def __init__(self, group: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class PushBlocksResponse(_message.Message):
    __slots__ = ("num_bytes", "receipt")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    receipt: _types_pb2_1.SignedPayload
    def __init__(self, num_bytes: _Optional[int] = ..., receipt: _Optional[_Union[_types_pb2_1.SignedPayload, _Mapping]] = ...) -> None: ...
