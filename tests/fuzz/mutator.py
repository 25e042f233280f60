"""Changes protobuf messages as a caller that means harm might: field by field, by their types."""

from __future__ import annotations

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

_INTS = (0, 1, 2, 7, 8, 63, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "pool", "default", "a" * 200, "\x00", "x\n\x1b[2J", "\u202e\u2028", "é" * 65, "../x")
_BITS = {
    Field.CPPTYPE_INT32: (32, True),
    Field.CPPTYPE_UINT32: (32, False),
    Field.CPPTYPE_INT64: (64, True),
    Field.CPPTYPE_UINT64: (64, False),
}
_MAX_REPEATED = 40


class Mutator:
    """Deterministic by its seed."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)

    def bytes_of(self, message: Message) -> bytes:
        """The message with a few changes, encoded; sometimes the encoding is changed too."""
        changed = type(message)()
        changed.CopyFrom(message)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 4))):
            self.change(changed)
        data = changed.SerializeToString()
        return self.changed_bytes(data) if self.random.random() < 0.1 else data

    def change(self, message: Message) -> None:
        """Change one field, of the message or of one inside it."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        present = [field for field, _ in message.ListFields()]
        field = self.random.choice(present if present and self.random.random() < 0.8 else fields)
        if field.is_repeated:
            self._change_list(getattr(message, field.name), field, message)
        elif field.message_type is not None:
            self._change_part(message, field)
        elif self.random.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))

    def _change_part(self, message: Message, field: Any) -> None:
        chance = self.random.random()
        if chance < 0.1:
            message.ClearField(field.name)
        elif chance < 0.2:
            getattr(message, field.name).SetInParent()
        else:
            self.change(getattr(message, field.name))

    def _change_list(self, values: Any, field: Any, message: Message) -> None:
        chance = self.random.random()
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            message.ClearField(field.name)
        elif not values or chance < 0.2:
            if field.message_type is not None:
                self.change(values.add())
            else:
                values.append(self._value(field, None))
        elif chance < 0.4:
            del values[self.random.randrange(len(values))]
        elif chance < 0.5:
            for _ in range(self.random.randrange(_MAX_REPEATED)):
                again = values[self.random.randrange(len(values))]
                values.add().CopyFrom(again) if field.message_type else values.append(again)
        elif field.message_type is not None:
            self.change(values[self.random.randrange(len(values))])
        else:
            i = self.random.randrange(len(values))
            values[i] = self._value(field, values[i])

    def _value(self, field: Any, now: Any) -> Any:
        kind = field.cpp_type
        if kind in _BITS:
            return self._int(*_BITS[kind], now)
        if kind == Field.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if kind == Field.CPPTYPE_ENUM:
            return self.random.choice((0, 1, 2, 3, 99, -1, 2**31 - 1))
        if kind in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
            return self.random.choice(_FLOATS)
        if field.type == Field.TYPE_STRING:
            return self.random.choice(_TEXTS)
        return self._column(now or b"")

    def _int(self, bits: int, is_signed: bool, now: int | None) -> int:
        value = self.random.choice(_INTS)
        if now is not None and self.random.random() < 0.5:
            value = now + self.random.choice((-1, 1, 2))
        elif is_signed and self.random.random() < 0.3:
            value = -value
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
        return min(max(value, least), most)

    def _column(self, data: bytes) -> bytes:
        """Packed integers with one of them changed, or other bytes."""
        chance = self.random.random()
        if len(data) >= 8 and chance < 0.5:
            kind, size = self.random.choice((("<i", 4), ("<q", 8)))
            at = self.random.randrange(len(data) // size) * size
            [now] = struct.unpack_from(kind, data, at)
            value = struct.pack(kind, self._int(8 * size, True, now))
            return data[:at] + value + data[at + size :]
        if chance < 0.7:
            return self.changed_bytes(data)
        if chance < 0.8:
            return data * self.random.randrange(4)
        return self.random.randbytes(self.random.choice((0, 1, 4, 8, 16, 32, 256)))

    def changed_bytes(self, data: bytes) -> bytes:
        """One bit flipped, or cut off, or something put in."""
        at = self.random.randrange(len(data) + 1)
        chance = self.random.random()
        if chance < 0.4 and at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << self.random.randrange(8)]) + data[at + 1 :]
        if chance < 0.7:
            return data[:at]
        return data[:at] + self.random.randbytes(self.random.randrange(1, 12)) + data[at:]
