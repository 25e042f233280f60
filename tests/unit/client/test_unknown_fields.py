"""A message of a later release is refused by the field that this one does not know."""

from __future__ import annotations

import pytest

from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.wire.protocol import refuse_unknown_fields
from kvplane.wire.v1 import control_pb2 as pb

LATER = b"\xc0\x3e\x07"  # field 1000, a number
STEP = pb.StepRequest(
    number=3, operations=[ops.free(1), ops.append(1, [5], 1, first_positions=4)], traceparent="x"
)


def parsed(**changed: bytes) -> pb.StepRequest:
    """``STEP`` as it comes from a peer that adds a field to the messages named."""
    step = pb.StepRequest()
    step.CopyFrom(STEP)
    append = step.operations[1].append
    append.MergeFromString(changed.get("append", b""))
    step.session.MergeFromString(changed.get("session", b""))
    return pb.StepRequest.FromString(step.SerializeToString() + changed.get("step", b""))


def test_what_is_known_is_left_as_it_is() -> None:
    step = parsed()
    refuse_unknown_fields(step, field="step", reader="data plane")
    assert step.operations == STEP.operations and step.traceparent == "x"
    given_with_zeros = pb.StepRequest.FromString(b"\x10\x00")  # number 0, which may be left out
    refuse_unknown_fields(given_with_zeros, field="step", reader="data plane")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ("step", "step"),
        ("session", "step.session"),
        ("append", "step.operations[1].append"),
    ],
)
def test_an_unknown_field_is_named(changed: str, field: str) -> None:
    text = r"number 1000: it was written by a later release: update this data plane"
    with pytest.raises(InvalidRequestError, match=text) as refused:
        refuse_unknown_fields(parsed(**{changed: LATER}), field="step", reader="data plane")
    assert refused.value.field == field
