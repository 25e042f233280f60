"""The twin says what the contract says, in the same bytes, whatever encoding a caller chose; a
message of a later release is refused by the field that this one does not know.
"""

from __future__ import annotations

import importlib
import random
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message

from kvplane import ops
from kvplane.errors import InvalidRequestError
from kvplane.plane.v1 import plan_pb2, registration_pb2
from kvplane.serving.limits.message_bounds import MAX_UNPACKED_BYTES, MessageBounds
from kvplane.v1 import execution_pb2, local_pb2, pool_pb2, prefix_pb2, session_pb2, types_pb2
from kvplane.wire import twin
from kvplane.wire.v1 import prefix_pb2 as wire_prefix
from kvplane.wire.v1 import session_pb2 as wire
from tests.helpers.encodings import ENCODINGS, encode
from tests.helpers.refusals import refused

CONTRACT: tuple[ModuleType, ...] = (
    types_pb2,
    local_pb2,
    pool_pb2,
    prefix_pb2,
    session_pb2,
    execution_pb2,
    plan_pb2,
    registration_pb2,
)
EXTREMES = {
    F.TYPE_INT32: (1, -1, 2**31 - 1, -(2**31)),
    F.TYPE_SFIXED32: (1, -1, 2**31 - 1, -(2**31), 0),
    F.TYPE_INT64: (1, -1, 2**63 - 1, -(2**63)),
    F.TYPE_SFIXED64: (1, -1, 2**63 - 1, -(2**63), 0),
    F.TYPE_FIXED64: (1, 2**64 - 1),
    F.TYPE_UINT32: (1, 127, 0),
    F.TYPE_BOOL: (True, False),
    F.TYPE_FLOAT: (0.5, -1.0),
    F.TYPE_STRING: ("a", "kv" * 40),
    F.TYPE_BYTES: (b"\0" * 16, b"a"),
}
LATER = b"\xc0\x3e\x07"  # field 1000, a number
STEP = session_pb2.StepRequest(
    number=3,
    session=types_pb2.SessionRef(incarnation=9, session_id=7),
    operations=[
        session_pb2.Operation(free=session_pb2.Free(sequence_ids=[4, 2, 9])),
        session_pb2.Operation(
            append=session_pb2.Append(
                sequence_ids=[1, 3],
                first_positions=[4, 0],
                num_slots=[1, 2],
                num_tokens=[1, 2],
                token_ids=[5, 6, 7],
            )
        ),
    ],
    traceparent="x",
)


def messages() -> Iterator[type[Message]]:
    for file in CONTRACT:
        for described in file.DESCRIPTOR.message_types_by_name.values():
            if described.name != "Callers":  # of an option, not of a message
                yield message_factory.GetMessageClass(described)


def requests() -> Iterator[type[Message]]:
    """Messages that are read whole: those of every method, and those that are signed."""
    described = {
        method.input_type.full_name: method.input_type
        for file in CONTRACT
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    for each in described.values():
        yield message_factory.GetMessageClass(each)
    yield from (plan_pb2.Plan, plan_pb2.Receipt, plan_pb2.SessionGrant, plan_pb2.PinGrant)


def filled(cls: type[Any], pick: random.Random, depth: int = 0) -> Any:
    """A message with some of its fields, and some of theirs."""
    message = cls()
    for field in cls.DESCRIPTOR.fields:
        if pick.random() < 0.25 or (field.type == F.TYPE_MESSAGE and depth > 3):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["key"] = 7
            continue
        values = [value(field, pick, depth) for _ in range(pick.choice((1, 3)))]
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        elif field.type == F.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(values[0])
        else:
            setattr(message, field.name, values[0])
    return message


def value(field: F, pick: random.Random, depth: int) -> Any:
    if field.type == F.TYPE_MESSAGE:
        return filled(message_factory.GetMessageClass(field.message_type), pick, depth + 1)
    if field.type == F.TYPE_ENUM:
        return pick.choice([each.number for each in field.enum_type.values])
    return pick.choice(EXTREMES[field.type])


def twin_type(cls: type[Message]) -> type[Message]:
    module = importlib.import_module(cls.__module__.replace("kvplane.", "kvplane.wire."))
    return cast("type[Message]", getattr(module, cls.__name__))


@pytest.mark.parametrize("cls", list(messages()), ids=lambda cls: cls.DESCRIPTOR.name)
def test_a_message_and_its_twin_have_the_same_bytes(cls: type[Message]) -> None:
    pick, wire_type = random.Random(cls.DESCRIPTOR.name), twin_type(cls)
    for _ in range(60):
        typed = filled(cls, pick)
        data = typed.SerializeToString()
        message = wire_type.FromString(data)
        assert message.SerializeToString() == data
        assert twin.whole(message, data) is message, "nothing is missing, so nothing is read again"
        assert cls.FromString(data) == typed


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("cls", list(requests()), ids=lambda cls: cls.DESCRIPTOR.name)
def test_every_encoding_of_a_request_is_read_whole(cls: type[Message], encoding: str) -> None:
    pick, wire_type = random.Random(cls.DESCRIPTOR.name), twin_type(cls)
    for _ in range(20):
        typed = filled(cls, pick)
        data, plain = encode(typed, encoding), typed.SerializeToString()
        assert cls.FromString(data) == typed, "the encoding is a legal one"
        read = twin.whole(wire_type.FromString(data), data)
        assert read == wire_type.FromString(plain)
        assert read.SerializeToString() == plain


def test_the_encodings_differ() -> None:
    plain = STEP.SerializeToString()
    assert len({plain, *(encode(STEP, encoding) for encoding in ENCODINGS)}) == 1 + len(ENCODINGS)


# An int32 of -1 in five bytes, which protobuf writes in ten: as much as is lost behind it.
SHORT_PRIORITY = bytes.fromhex("28ffffffff0f")


def test_a_loss_is_found_where_a_number_grows_by_as_much() -> None:
    kind, element = prefix_pb2.RetainPrefixRequest, struct.Struct("<Bi")
    data = b"\x1a\x08" + struct.pack("<2i", 1, 2) + element.pack(3 << 3 | 5, 3) + SHORT_PRIORITY
    typed = kind(token_ids=[1, 2, 3], priority=-1)
    assert kind.FromString(data) == typed, "the encoding is a legal one"
    read = twin.whole(wire_prefix.RetainPrefixRequest.FromString(data), data)
    assert read.SerializeToString() == typed.SerializeToString()

    data = SHORT_PRIORITY + element.pack(15 << 3 | 5, 7)
    with pytest.raises(InvalidRequestError, match="does not know, number 15"):
        twin.whole(wire_prefix.RetainPrefixRequest.FromString(data), data)


def test_what_the_builders_make_is_what_the_contract_says() -> None:
    typed = session_pb2.Operation.FromString(
        ops.append(
            [1, 3], [5, 6, 7], [1, 2], first_positions=[4, 0], num_tokens=[1, 2]
        ).SerializeToString()
    )
    assert typed == STEP.operations[1]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ("", "step"),
        ("session", "step.session"),
        ("operations[1]", "step.operations[1]"),
        ("operations[1].append", "step.operations[1].append"),
    ],
)
@pytest.mark.parametrize("encoding", ["", *ENCODINGS])
def test_an_unknown_field_is_named(changed: str, field: str, encoding: str) -> None:
    step = session_pb2.StepRequest()
    step.CopyFrom(STEP)
    at: Any = step
    for name in filter(None, changed.split(".")):
        name, _, index = name.partition("[")
        at = getattr(at, name)
        at = at[int(index.rstrip("]"))] if index else at
    at.MergeFromString(LATER)
    data = step.SerializeToString()
    if encoding and not changed:
        data = encode(STEP, encoding) + LATER
    with refused(InvalidRequestError, field, match="does not know, number 1000"):
        twin.whole(wire.StepRequest.FromString(data), data, field="step")


def test_a_column_that_ends_inside_an_element_is_left_to_its_reader() -> None:
    step = wire.StepRequest(operations=[wire.Operation(free=wire.Free(sequence_ids=b"\1" * 9))])
    data = step.SerializeToString()
    assert twin.whole(wire.StepRequest.FromString(data), data) == step
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        data = b"\x10\x00" + data  # a zero written out: the other parser reads it
        twin.whole(wire.StepRequest.FromString(data), data)


def test_unpacked_columns_are_bounded_and_count_as_few_fields() -> None:
    bounds = MessageBounds(session_pb2.StepRequest.DESCRIPTOR)
    step = session_pb2.StepRequest(operations=[session_pb2.Operation()])
    tokens = step.operations[0].admit.token_ids
    tokens.extend(range(100_000))
    bounds.check(step.SerializeToString())
    bounds.check(encode(step, "unpacked"))
    tokens.extend(range(MAX_UNPACKED_BYTES // 5 - 100_000))
    bounds.check(encode(step, "unpacked"))
    tokens.append(1)
    with refused(InvalidRequestError, "operations.admit.token_ids", match="must be packed"):
        bounds.check(encode(step, "unpacked"))


def test_runs_of_unpacked_elements_are_bounded() -> None:
    bounds = MessageBounds(session_pb2.SequenceStates.DESCRIPTOR)
    long_id, tier, large_tier = b"\x09" + b"\0" * 8, b"\x40\x01", b"\x40\xff\x7f"
    bounds.check(tier * 100_000 + long_id * 1000)
    bounds.check((tier + long_id) * 2000)
    for runs in (tier + long_id, large_tier, large_tier + tier):
        with pytest.raises(InvalidRequestError, match="too many fields"):
            bounds.check(runs * 5000)
