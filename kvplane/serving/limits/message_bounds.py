"""Bounds on the elements of a request, counted on its bytes: to build a message's objects takes
many times the time and memory that it takes to count them.

``MAX_COUNTS`` bounds each field that repeats; a server may set other bounds for some. Columns,
which are bytes, need no entry: their readers compare lengths before they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvplane.errors import InvalidRequestError

# By message and field: the most elements in one request, over all its messages of this type.
MAX_COUNTS: Final[Mapping[str, int]] = {
    "StepRequest.operations": 4096,
    "StepRequest.receipts": 4096,
    "CheckOperationsRequest.operations": 4096,
    "SubmitReceiptsRequest.receipts": 4096,
    "AbortPlanRequest.receipts": 4096,
    "ResyncRequest.receipts": 4096,
    "FindPrefixRequest.pool_ids": 1024,
    "Layout.groups": 64,
    "LayerGroup.layers": 4096,
    "LayerGroup.key_scales": 65_536,
    "LayerGroup.value_scales": 65_536,
    "Hello.groups": 64,
    "BlockReport.blocks": 1024,
    "BlockReport.publications": 1024,
    "AttentionOptions.alibi_slopes": 65_536,
    "AttentionOptions.sinks": 65_536,
    "Tensor.shape": 16,
}
MAX_STRING_BYTES: Final = 8192
# A message here has ten fields at most. Singular and unknown fields are bounded by the number of
# elements in the request; more can only be an attempt to waste time.
_MAX_FIELDS: Final = 4096
_MAX_FIELDS_PER_ELEMENT: Final = 16
_FIELD_BYTES: Final = 2  # at least
# Shorter messages within a request have too few fields to need a check.
_SMALL_BYTES: Final = 256

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_CONTINUED: Final = bytes(range(128, 256))  # bytes after which a varint continues


class _Field:
    """A field that is more than a single number."""

    __slots__ = ("inner", "is_float", "is_packed", "is_string", "most", "name")

    def __init__(self, field: FieldDescriptor, most: int | None, inner: _Fields | None) -> None:
        """``most``: elements, where it repeats. ``inner``: the fields of a message."""
        self.name = field.name
        self.most = most
        self.inner = inner
        self.is_string = field.type == FieldDescriptor.TYPE_STRING
        self.is_float = field.type == FieldDescriptor.TYPE_FLOAT
        self.is_packed = most is not None and inner is None and not self.is_string

    def least_bytes(self) -> int:
        """Return the bytes of the shortest value that exceeds a bound."""
        if self.is_string:
            return MAX_STRING_BYTES
        if self.most is None:
            return _FIELD_BYTES * _MAX_FIELDS
        return self.most * (1 if self.is_packed else _FIELD_BYTES)


_Fields = dict[int, _Field]


class MessageBounds:
    """The bounds of one type of request."""

    def __init__(self, descriptor: Descriptor, changes: Mapping[str, int] | None = None) -> None:
        """``changes``: bounds to use in place of those of ``MAX_COUNTS``."""
        self._max_counts = {**MAX_COUNTS, **(changes or {})}
        self._known: dict[str, _Fields] = {}
        self._fields = self._read(descriptor)
        of_all = (field for fields in self._known.values() for field in fields.values())
        self._least_bytes = min((field.least_bytes() for field in of_all), default=0)

    def check(self, data: bytes) -> None:
        """Raise InvalidRequestError naming a field that exceeds its bound. Malformed bytes are left
        to the parser.
        """
        if len(data) <= self._least_bytes:
            return
        try:
            _Walk(data).message(self._fields, 0, len(data), "")
        except IndexError:
            return

    def _read(self, descriptor: Descriptor) -> _Fields:
        """Return the fields to check, by number."""
        fields = self._known.get(descriptor.full_name)
        if fields is None:
            fields = self._known[descriptor.full_name] = {}
            for field in descriptor.fields:
                inner = self._read(field.message_type) if field.message_type else None
                name = f"{descriptor.name}.{field.name}"
                most = self._max_counts[name] if field.is_repeated else None
                fields[field.number] = _Field(field, most, inner)
        return fields


class _Walk:
    """Walks through one request and counts its elements."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._counts: dict[_Field, int] = {}
        self._num_left = _MAX_FIELDS

    def message(self, fields: _Fields, at: int, end: int, path: str) -> None:
        """Count the elements of the message in ``data[at:end]``. ``path``: of the message, with
        dots. Raises InvalidRequestError, and IndexError for bytes that are no message.
        """
        while at < end:
            tag, begin = self._varint(at)
            field, kind = fields.get(tag >> 3), tag & 7
            if kind == _DELIMITED:
                length, begin = self._varint(begin)
                at = begin + length
            elif kind == _VARINT:
                _, at = self._varint(begin)
            elif kind in _FIXED_BYTES:
                at = begin + _FIXED_BYTES[kind]
            else:
                raise InvalidRequestError("holds a group", field=path.rstrip("."))
            if at > end:
                raise IndexError
            if field is None or field.most is None:
                self._num_left -= 1
                if self._num_left < 0:
                    raise InvalidRequestError("holds too many fields", field=path.rstrip("."))
            if field is not None:
                self._look_at(field, kind, begin, at, path)

    def _look_at(self, field: _Field, kind: int, begin: int, end: int, path: str) -> None:
        if field.most is not None:
            num = (
                self._num_packed(field, begin, end) if field.is_packed and kind == _DELIMITED else 1
            )
            count = self._counts[field] = self._counts.get(field, 0) + num
            if count > field.most:
                raise InvalidRequestError(
                    f"must be at most {field.most} in one request", field=path + field.name
                )
            self._num_left += _MAX_FIELDS_PER_ELEMENT if not field.is_packed else 0
        if kind != _DELIMITED:
            return
        if field.is_string and end - begin > MAX_STRING_BYTES:
            raise InvalidRequestError(
                f"must have at most {MAX_STRING_BYTES} bytes", field=path + field.name
            )
        if field.inner is not None and end - begin >= _SMALL_BYTES:
            self.message(field.inner, begin, end, f"{path}{field.name}.")

    def _num_packed(self, field: _Field, begin: int, end: int) -> int:
        if field.is_float:
            return (end - begin) // 4
        return len(self._data[begin:end].translate(None, _CONTINUED))

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the number at ``at``, and the offset after it."""
        byte = self._data[at]
        if byte < 0x80:
            return byte, at + 1
        value, shift = byte & 0x7F, 7
        while byte >= 0x80 and shift < 70:
            at += 1
            byte = self._data[at]
            value |= (byte & 0x7F) << shift
            shift += 7
        return value, at + 1
