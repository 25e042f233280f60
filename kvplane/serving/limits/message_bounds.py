"""Bounds on the elements of a request, counted on its bytes: to build a message's objects takes
many times the time and memory that it takes to count them.

``MAX_COUNTS`` bounds each field that repeats; a server may set other bounds for some. Columns
(see ``protos/kvplane/v1/types.proto``) need no entry: packed ones are bytes, whose readers compare
lengths before they read. Unpacked ones are read again by another parser, so that they have a bound
of their own.
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
    "AbortPlansRequest.receipts": 4096,
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
    "ReadBlocksRequest.keys": 4096,
    "WriteBlocksRequest.keys": 4096,
}
MAX_STRING_BYTES: Final = 8192
MAX_UNPACKED_BYTES: Final = 1 << 20
"""Bytes that the elements of unpacked columns may take in one request, tags included."""
# A message here has ten fields at most. Singular and unknown fields are bounded by the number of
# elements in the request; more can only be an attempt to waste time.
_MAX_FIELDS: Final = 4096
_MAX_FIELDS_PER_ELEMENT: Final = 16
_FIELD_BYTES: Final = 2  # at least
# Shorter messages within a request have too few fields to need a check.
_SMALL_BYTES: Final = 256

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_ONE_BYTE: Final = bytes(range(128))  # varints of one byte
_CONTINUED: Final = bytes(range(128, 256))  # bytes after which a varint continues
# The types of columns: how an element is written, and in how many bytes after its tag.
_COLUMNS: Final = {
    FieldDescriptor.TYPE_SFIXED32: (_FIXED32, 4),
    FieldDescriptor.TYPE_SFIXED64: (_FIXED64, 8),
    FieldDescriptor.TYPE_BOOL: (_VARINT, 1),
    FieldDescriptor.TYPE_ENUM: (_VARINT, 1),
    FieldDescriptor.TYPE_UINT32: (_VARINT, 1),
}
# Elements of a column that are looked at in one go, doubled as long as the column goes on.
_FIRST_RUN, _LONGEST_RUN = 16, 1 << 14


class _Field:
    """A repeated field, or a message field, whose elements are counted."""

    __slots__ = ("column", "inner", "is_float", "is_packed", "is_string", "most", "name")

    def __init__(self, field: FieldDescriptor, most: int | None, inner: _Fields | None) -> None:
        """``most``: elements, if it repeats. ``inner``: the fields of each, if it is a message."""
        self.name = field.name
        self.column = _COLUMNS.get(field.type) if field.is_repeated else None
        self.most = most
        self.inner = inner
        self.is_string = field.type == FieldDescriptor.TYPE_STRING
        self.is_float = field.type == FieldDescriptor.TYPE_FLOAT
        self.is_packed = most is not None and inner is None and not self.is_string

    def least_bytes(self) -> int:
        """Return the length in bytes of the shortest value that exceeds the field's bound."""
        if self.is_string:
            return MAX_STRING_BYTES
        if self.most is None:
            return _FIELD_BYTES * _MAX_FIELDS
        return self.most * (1 if self.is_packed else _FIELD_BYTES)


_Fields = dict[int, _Field]


class MessageBounds:
    """Bounds on the number of elements in one type of request."""

    def __init__(self, descriptor: Descriptor, changes: Mapping[str, int] | None = None) -> None:
        """``changes``: bounds that replace some of those in ``MAX_COUNTS``."""
        self._max_counts = {**MAX_COUNTS, **(changes or {})}
        self._known: dict[str, _Fields] = {}
        self._fields = self._read(descriptor)
        of_all = (field for fields in self._known.values() for field in fields.values())
        self._least_bytes = min((field.least_bytes() for field in of_all), default=0)

    def check(self, data: bytes) -> None:
        """Raise InvalidRequestError naming a field that exceeds its bound. Malformed bytes are left
        for the parser to refuse.
        """
        if len(data) <= self._least_bytes:
            return
        try:
            _Walk(data).message(self._fields, 0, len(data), "")
        except IndexError:
            return

    def _read(self, descriptor: Descriptor) -> _Fields:
        """Return the fields of a message type that have to be counted, by field number."""
        fields = self._known.get(descriptor.full_name)
        if fields is None:
            fields = self._known[descriptor.full_name] = {}
            for field in descriptor.fields:
                inner = self._read(field.message_type) if field.message_type else None
                name = f"{descriptor.name}.{field.name}"
                is_column = field.is_repeated and field.type in _COLUMNS
                assert not is_column or field.number < 16, f"{name}: its tag must have one byte"
                most = self._max_counts[name] if field.is_repeated and not is_column else None
                fields[field.number] = _Field(field, most, inner)
        return fields


class _Walk:
    """Walks through the bytes of one request and counts its elements."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._counts: dict[_Field, int] = {}
        self._num_left = _MAX_FIELDS
        self._num_unpacked_bytes = 0

    def message(self, fields: _Fields, at: int, end: int, path: str) -> None:
        """Count the elements of the message in ``data[at:end]``. ``path``: of the message, with
        dots. Raises InvalidRequestError, and IndexError for bytes that are no message.
        """
        while at < end:
            tag, begin = self._varint(at)
            field, kind = fields.get(tag >> 3), tag & 7
            if field is not None and field.column is not None and field.column[0] == kind:
                at = self._unpacked(field, at, begin, end, path)
                continue
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
                self._count_field(path)
            if field is not None:
                self._look_at(field, kind, begin, at, path)

    def _unpacked(self, field: _Field, at: int, begin: int, end: int, path: str) -> int:
        """Return the offset after the elements of an unpacked column, the first of which has its
        tag at ``at`` and its value at ``begin``. Raises InvalidRequestError when they are too many.
        """
        kind, size_bytes = field.column or (0, 0)
        first, width, num = at, begin - at + size_bytes, _FIRST_RUN
        while True:
            run = self._data[at : min(at + num * width, end)]
            tags, values = run[::width], run[1::width]
            num_same = len(tags) - len(tags.lstrip(run[:1]))
            if kind == _VARINT:  # a longer one ends the run
                num_same = min(num_same, len(values) - len(values.lstrip(_ONE_BYTE)))
            at += num_same * width
            if num_same < len(tags) or at >= end:
                break
            num = min(2 * num, _LONGEST_RUN)
        if at == first:
            _, at = self._varint(begin)
        if at > end:
            raise IndexError
        self._num_unpacked_bytes += at - first
        if self._num_unpacked_bytes > MAX_UNPACKED_BYTES:
            raise InvalidRequestError(
                f"must be packed: a request may have {MAX_UNPACKED_BYTES} bytes of columns that "
                "are not",
                field=path + field.name,
            )
        self._count_field(path)
        return at

    def _count_field(self, path: str) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise InvalidRequestError("holds too many fields", field=path.rstrip("."))

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
        """Decode the varint at an offset; returns it, and the offset after it."""
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
