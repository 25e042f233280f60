"""The twin of the contract: ``kvplane.wire.v1`` has the messages of ``kvplane.v1``, and
``kvplane.wire.plane.v1`` those of ``kvplane.plane.v1``, with the same bytes, but a column is the
bytes of its elements (see ``scripts/protos.sh``).

protobuf allows other encodings of the same message than the one that its libraries in most
languages write: columns unpacked or in several parts, zeros written out. The twin cannot read all
of them. So what the twin has read is written again, and the bytes are compared. Where they differ
the contract's own types read the message and encode it, which takes longer: also where nothing is
lost, as with fields in another order.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvplane.errors import InvalidRequestError

TYPED: Final = "kvplane."
TWIN: Final = "kvplane.wire."

MessageT = TypeVar("MessageT", bound=Message)


def whole(message: MessageT, data: bytes, *, field: str = "", reader: str = "server") -> MessageT:
    """Return the complete message that ``data`` encodes. ``message``: what ``FromString(data)`` of
    a type of the twin returned, which is returned itself unless something is missing in it.

    Raises InvalidRequestError when the message, or one in it, has a field that this release does
    not know: it could change what the others mean. The error names the message that has one, below
    ``field``, its number, and the ``reader`` that must be updated, such as "data plane".
    """
    message.DiscardUnknownFields()
    if message.SerializeToString() == data:  # a length would hide a loss behind a number that grew
        return message
    kind: Any = type(message)
    try:
        typed = _typed(kind).FromString(data)
    except DecodeError as error:
        raise InvalidRequestError("has a column that cannot be read", field=field) from error
    encoded = typed.SerializeToString()
    unknown = _first_unknown(typed)
    if unknown is not None:
        at, number = unknown
        path = f"{field}.{at}" if field and at else field or at
        raise InvalidRequestError(
            f"has a field that this release does not know, number {number}: it was written by a "
            f"later release: update this {reader}",
            field=path,
        )
    return type(message).FromString(encoded)


@cache
def _typed(twin: Any) -> Any:
    """Return the contract's own type of a twin's message. Those of plug-ins have no twin."""
    described = twin.DESCRIPTOR
    name = described.full_name
    if not name.startswith(TWIN):
        return twin
    module = described.file.name.replace("/", ".").replace(TWIN, TYPED).replace(".proto", "_pb2")
    contract = importlib.import_module(module)  # most processes never need it
    return getattr(contract, described.name)


def _first_unknown(message: Message) -> tuple[str, int] | None:
    """Return the path of the first message with an unknown field, and the field's number."""
    unknown: Any = UnknownFieldSet(message)
    if len(unknown):
        return "", unknown[0].field_number
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for i, inner in enumerate(value if field.is_repeated else [value]):
            found = _first_unknown(inner)
            if found is not None:
                index = f"[{i}]" if field.is_repeated else ""
                return f"{field.name}{index}{'.' if found[0] else ''}{found[0]}", found[1]
    return None
