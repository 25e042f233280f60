"""Layouts as peers send them, and which of them this control plane serves."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message

from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.v1 import types_pb2 as tpb

FINGERPRINT_BYTES: Final = 32
_SERVED_KINDS: Final = (tpb.CACHE_KIND_UNSPECIFIED, tpb.CACHE_KIND_KEYS_AND_VALUES)


def served_layout(message: tpb.Layout, *, field: str) -> Layout:
    """A layout sent whole. Raises InvalidRequestError naming a field under ``field`` when it means
    nothing, or something that is not served here.
    """
    require_known_fields(message, field=field)
    if len(message.groups) > 1:
        raise InvalidRequestError("must be one layer group", field=f"{field}.groups")
    for group in message.groups:
        if group.cache_kind not in _SERVED_KINDS:
            raise InvalidRequestError(
                "must be CACHE_KIND_KEYS_AND_VALUES", field=f"{field}.groups[0].cache_kind"
            )
        if group.value_head_size not in (0, group.head_size):
            raise InvalidRequestError(
                "must be head_size, or 0", field=f"{field}.groups[0].value_head_size"
            )
    try:
        return Layout.from_proto(message)
    except InvalidRequestError as error:
        at = error.field.replace("layout", field, 1) if "layout" in error.field else field
        raise InvalidRequestError(error.message, field=at) from error


def layout_fingerprint(message: tpb.Layout, *, field: str) -> bytes:
    """The fingerprint of a layout that is sent whole or by its fingerprint alone. Raises as
    ``served_layout``.
    """
    if message.model_id or message.groups or message.block_size_tokens:
        return served_layout(message, field=field).fingerprint
    if len(message.fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequestError(
            f"must be {FINGERPRINT_BYTES} bytes, or the layout must be whole",
            field=f"{field}.fingerprint",
        )
    return message.fingerprint


def require_known_fields(message: Message, *, field: str) -> None:
    """Raise InvalidRequestError naming ``field`` when a part of the message is of a later release:
    it could change the meaning of the rest.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        raise InvalidRequestError(
            "holds a field that this release does not know: upgrade this side, or leave it out",
            field=field,
        )
