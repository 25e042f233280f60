"""A session's layout comes whole or by its fingerprint alone; what means nothing is refused."""

from __future__ import annotations

import pytest

from control_plane.pools.layouts import layout_fingerprint, served_layout
from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT
from tests.helpers.refusals import refused

FLOAT32 = tpb.ELEMENT_TYPE_FLOAT32


def test_a_layout_is_known_whole_or_by_its_fingerprint() -> None:
    whole = LAYOUT.to_proto()
    assert served_layout(whole, field="layout") == LAYOUT
    assert layout_fingerprint(whole, field="layout") == LAYOUT.fingerprint
    alone = tpb.Layout(fingerprint=LAYOUT.fingerprint)
    assert layout_fingerprint(alone, field="layout") == LAYOUT.fingerprint


def too_many_groups() -> tpb.Layout:
    message = LAYOUT.to_proto()
    for layer in range(2, 66):
        message.groups.add(name=str(layer), layers=[layer], num_kv_heads=2, head_size=8)
    message.fingerprint = b""
    return message


def test_a_field_of_a_later_release_is_refused() -> None:
    message = tpb.Layout.FromString(LAYOUT.to_proto().SerializeToString() + b"\x98\x06\x01")
    with refused(InvalidRequestError, "layout"):
        layout_fingerprint(message, field="layout")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tpb.Layout(), "fingerprint"),
        (tpb.Layout(fingerprint=b"short"), "fingerprint"),
        (tpb.Layout(model_id="m"), "dtype"),
        (tpb.Layout(model_id="m", dtype=FLOAT32, kv_dtype=FLOAT32), "block_size_tokens"),
        (too_many_groups(), "groups"),
    ],
)
def test_a_layout_that_means_nothing_is_refused_by_its_field(
    message: tpb.Layout, field: str
) -> None:
    with refused(InvalidRequestError, f"hello.layout.{field}"):
        layout_fingerprint(message, field="hello.layout")
