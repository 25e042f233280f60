"""Layouts as peers send them, and which of them this control plane serves."""

from __future__ import annotations

from typing import Final

from kvplane.errors import InvalidRequestError, LayoutMismatchError
from kvplane.layout import Layout
from kvplane.wire.v1 import types_pb2 as tpb

FINGERPRINT_BYTES: Final = 32
MAX_GROUPS: Final = 64


def served_layout(message: tpb.Layout, *, field: str) -> Layout:
    """Parse a layout that was sent whole. Raises InvalidRequestError naming a field under ``field``
    when it is malformed, or of a kind that this control plane does not serve.
    """
    if len(message.groups) > MAX_GROUPS:
        raise InvalidRequestError(
            f"must be at most {MAX_GROUPS} layer groups", field=f"{field}.groups"
        )
    try:
        return Layout.from_proto(message)
    except InvalidRequestError as error:
        at = error.field.replace("layout", field, 1)
        raise InvalidRequestError(error.message, field=at) from error


def mismatch(message: tpb.Layout, layout: Layout, pool_id: str) -> LayoutMismatchError:
    """Return the error for a caller whose layout has another fingerprint than the pool's."""
    text = "its fingerprint is another; send the whole layout to see the difference"
    if message.groups:
        text = f"it has {Layout.from_proto(message).differences(layout)}"
    return LayoutMismatchError(f"is not that of pool {pool_id!r}: {text}", field="layout")


def layout_fingerprint(message: tpb.Layout, *, field: str) -> bytes:
    """Return the fingerprint of a layout, sent whole or as fingerprint. Raises as
    ``served_layout``.
    """
    if message.model_id or message.groups or message.block_size_tokens:
        return served_layout(message, field=field).fingerprint
    if len(message.fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequestError(
            f"must be {FINGERPRINT_BYTES} bytes, unless the whole layout is sent",
            field=f"{field}.fingerprint",
        )
    return message.fingerprint
