"""Messages that end with many bytes, encoded and read with one copy of them.

protobuf's Python library copies bytes into a message, from there into the encoding, and out of it
again. Here the bytes are the last field of their message, which is the last field of the one around
it, and so on. Every reader of the contract reads that; ``decode`` finds the bytes without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_VARINT: Final = 0
_BYTES: Final = 2
"""The wire type of bytes, strings, columns and messages."""


def encode(levels: Sequence[tuple[bytes, int]], data: Sequence[bytes | memoryview]) -> bytes:
    """Encode a message that ends with ``data``, put together.

    ``levels``: for the message and each that it ends with, from the outside in, the encoding of its
    other fields and the number of its last one, 1 to 15.
    """
    parts, num_bytes = [*data], sum(map(len, data))
    for others, field in reversed(levels):
        head = others + bytes([field << 3 | _BYTES]) + _varint(num_bytes)
        parts.insert(0, head)
        num_bytes += len(head)
    return b"".join(parts)


def decode(encoded: bytes, fields: Sequence[int]) -> tuple[list[bytes], memoryview] | None:
    """Return what ``encode`` was given with these fields, without their numbers: the other fields
    of each message, and the data. None for another encoding, which protobuf has to read.
    """
    levels, at = list[bytes](), 0
    try:
        for field in fields:
            begin, last, key, content = at, at, 0, at
            while at < len(encoded):
                last = at
                key, at = _read_varint(encoded, at)
                number, content = _read_varint(encoded, at)
                if key & 7 == _BYTES:
                    at = content + number
                elif key & 7 == _VARINT:
                    at = content
                else:
                    return None
            if at != len(encoded) or key != field << 3 | _BYTES:
                return None
            levels.append(encoded[begin:last])
            at = content
    except IndexError:
        return None
    return levels, memoryview(encoded)[at:]


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(encoded: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises IndexError for one that is cut off or too long."""
    number = 0
    for shift in range(0, 64, 7):
        byte = encoded[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte <= 0x7F:
            return number, at
    raise IndexError
