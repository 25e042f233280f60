"""Messages in encodings that protobuf allows and that its libraries for Python do not write."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message

ENCODINGS: Final = ("unpacked", "chunks", "zeros", "long")
_FIXED: Final = {F.TYPE_SFIXED32: 4, F.TYPE_FIXED32: 4, F.TYPE_FLOAT: 4}
_FIXED |= {F.TYPE_SFIXED64: 8, F.TYPE_FIXED64: 8, F.TYPE_DOUBLE: 8}
_BYTES: Final = (F.TYPE_STRING, F.TYPE_BYTES, F.TYPE_MESSAGE)


def encode(message: Message, encoding: str) -> bytes:
    """Encode a message of ``kvplane.v1``.

    ``encoding``: "unpacked" writes each element of a repeated field by itself, "chunks" writes
    repeated fields in two parts, "zeros" writes fields that have their default, "long" writes
    numbers that are no elements in more bytes than they need.
    """
    return b"".join(_fields(message, encoding))


def _fields(message: Message, encoding: str) -> Iterator[bytes]:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            yield from _repeated(field, value, encoding)
        elif (
            message.HasField(field.name) if field.has_presence else value != field.default_value
        ) or (encoding == "zeros" and not field.has_presence):
            yield _tagged(field, _value(field, value, encoding), encoding)


def _repeated(field: F, values: Any, encoding: str) -> Iterator[bytes]:
    elements = [_value(field, value, "" if _is_packed(field) else encoding) for value in values]
    if not _is_packed(field) or encoding == "unpacked":
        yield from (_tagged(field, element, encoding) for element in elements)
    elif encoding == "chunks":
        half = len(elements) // 2
        for part in (elements[:half], elements[half:]):
            yield _varint(field.number << 3 | 2) + _delimited(b"".join(part))
    elif elements or encoding == "zeros":
        yield _varint(field.number << 3 | 2) + _delimited(b"".join(elements))


def _is_packed(field: F) -> bool:
    return field.type not in _BYTES


def _tagged(field: F, value: bytes, encoding: str) -> bytes:
    kind = 2 if field.type in _BYTES else {4: 5, 8: 1}.get(_FIXED.get(field.type, 0), 0)
    return _varint(field.number << 3 | kind, is_long=encoding == "long") + value


def _value(field: F, value: Any, encoding: str) -> bytes:
    if field.type == F.TYPE_MESSAGE:
        return _delimited(encode(value, encoding))
    if field.type in (F.TYPE_STRING, F.TYPE_BYTES):
        return _delimited(value.encode() if isinstance(value, str) else value)
    if field.type in (F.TYPE_FLOAT, F.TYPE_DOUBLE):
        return struct.pack("<f" if field.type == F.TYPE_FLOAT else "<d", value)
    if field.type in _FIXED:
        size = _FIXED[field.type]
        return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
    return _varint(int(value) % (1 << 64), is_long=encoding == "long")


def _delimited(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int, *, is_long: bool = False) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    if is_long and len(encoded) < 4:
        encoded[-1] |= 0x80
        encoded.append(0)
    return bytes(encoded)
