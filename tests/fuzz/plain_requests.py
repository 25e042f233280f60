"""Steps as bytes: valid requests, and the same with their encoding changed; read, and run.

What reads as a plain step must be what protobuf has of it, to the byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplane_blocks import PlainStep

from control_plane.sessions.numbering import content_of
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import signing
from tests.fuzz.pool_world import NUM_BLOCKS, Call, Session, World

if TYPE_CHECKING:
    from atheris import FuzzedDataProvider

INCARNATION, SESSION_ID = 3, 5


def read(encoded: bytes) -> PlainStep | None:
    """The request if it is plain, and everything that is shown of it."""
    step = PlainStep.read(encoded)
    if step is None:
        return None
    request = cpb.StepRequest.FromString(encoded)
    assert request.SerializeToString(deterministic=True) == encoded == step.data
    ref = request.session
    shown = (step.incarnation, step.session_id, step.number)
    assert shown == (ref.incarnation, ref.session_id, request.number)
    assert step.content == content_of(request)
    assert [each[2:] for each in step.receipts] == [
        (each.payload, each.signature) for each in request.receipts
    ]
    kinds = [operation.WhichOneof("operation") for operation in request.operations]
    assert ([step.kind] if step.kind else []) == kinds
    if step.kind:
        _check_operation(step, getattr(request.operations[0], step.kind))
    return step


def _check_operation(step: PlainStep, operation: Any) -> None:
    assert step.num_tokens * 4 == len(operation.token_ids)
    if step.kind == "append":
        assert step.num_items * 8 == len(operation.sequence_ids)
    else:
        assert step.sequence_id == operation.sequence_id


# Requests


def append_of(world: World, session: Session) -> cpb.Operation:
    num = world.data.ConsumeIntInRange(1, 3)
    counts = [world.data.ConsumeIntInRange(0, 3) for _ in range(num)]
    ids = world.some_ids(session, num)
    return cpb.Operation(
        append=cpb.Append(
            sequence_ids=ids,
            first_positions=world.positions(session, ids),
            num_slots=world.column(4, num, 6),
            num_tokens=b"".join(count.to_bytes(4, "little") for count in counts),
            token_ids=world.column(4, sum(counts), 2),
        )
    )


def admission(world: World) -> cpb.Operation:
    tokens = world.prompt() if world.data.ConsumeBool() else world.tokens(4 * NUM_BLOCKS + 4)
    longest = world.data.PickValueInList([0, 0, 44, 2**40])
    return cpb.Operation(
        admit=cpb.Admit(sequence_id=world.number(9), token_ids=tokens, max_total_tokens=longest)
    )


def receipt(data: FuzzedDataProvider, plan: int) -> tpb.SignedPayload:
    """As a data plane makes it, but for the signature, which is not looked at here."""
    of = tpb.Receipt(version=1, plan_number=plan, shard_index=data.ConsumeIntInRange(0, 2))
    signature = bytes(data.ConsumeIntInRange(0, 3))
    payload = of.SerializeToString()
    return tpb.SignedPayload(type=signing.RECEIPT, payload=payload, signature=signature)


def request(world: World, session: Session) -> cpb.StepRequest:
    """The session's next step."""
    data = world.data
    step = cpb.StepRequest(
        session=tpb.SessionRef(incarnation=INCARNATION, session_id=SESSION_ID),
        number=session.number + 1,
        receipts=[receipt(data, session.number) for _ in range(data.ConsumeIntInRange(0, 2))],
    )
    kind = data.ConsumeIntInRange(0, 4)
    if kind:
        step.operations.append(append_of(world, session) if kind > 2 else admission(world))
    return step


# Changes


def changed(data: FuzzedDataProvider, encoded: bytes) -> bytes:
    """The encoding with a few places changed; often none."""
    for _ in range(data.PickValueInList([0, 0, 1, 1, 2, 4])):
        at, size = data.ConsumeIntInRange(0, len(encoded)), data.ConsumeIntInRange(0, 9)
        kind = data.ConsumeIntInRange(0, 4)
        part = encoded[at : at + size]
        other = {
            0: bytes([data.ConsumeIntInRange(0, 255)]),  # another byte, or one more
            1: b"",
            2: bytes(data.ConsumeBytes(size)),
            3: part + part,
        }
        if kind == 4:
            encoded = encoded[:at]
        else:
            num_replaced = 1 if kind == 0 and size else len(part) if kind != 2 else 0
            encoded = encoded[:at] + other[kind] + encoded[at + num_replaced :]
    return encoded


# Targets


def seeds() -> list[bytes]:
    """Requests that read as plain steps, for the fuzzer to begin with."""
    ref = tpb.SessionRef(incarnation=INCARNATION, session_id=SESSION_ID)
    payload = tpb.Receipt(version=1, session=ref, pool_id="p", shard_index=1, plan_number=2)
    signed = tpb.SignedPayload(
        type=signing.RECEIPT, payload=payload.SerializeToString(), signature=bytes(8)
    )
    operations = (
        [],
        [ops.append([1, 2], [7, 8], 1, first_positions=[3, 4], num_tokens=1)],
        [ops.admit(2**40, range(5), max_total_tokens=900)],
    )
    return [
        cpb.StepRequest(
            session=ref, number=300, operations=operation, receipts=[signed] * num
        ).SerializeToString()
        for num, operation in enumerate(operations)
    ]


def fuzz_plain_bytes(data: FuzzedDataProvider) -> None:
    """Any bytes."""
    read(bytes(data.ConsumeBytes(data.remaining_bytes())))


def plain_step(world: World, session: Session) -> None:
    """A request, perhaps a changed one, that is run if it is still the session's next step."""
    world.finish(session)
    step = read(changed(world.data, request(world, session).SerializeToString()))
    try:
        if step is not None and step.number == session.number + 1:
            run(world, session, step)
    finally:
        world.begin(session)


def run(world: World, session: Session, step: PlainStep) -> None:
    data, pool = world.data, world.pool
    done = data.ConsumeIntInRange(0, pool.last_plan(session.handle))
    most_tokens = data.PickValueInList([2**16, 2**16, 2**16, 2**16, 2**16, 2**16, 0, -1])
    headroom = world.number(2) if data.ConsumeIntInRange(0, 7) == 7 else 0
    ran = pool.plain_step(session.handle, step, done, headroom, most_tokens, b"")
    if ran is None:  # nothing has changed
        return
    session.number = step.number
    if isinstance(ran, bool):
        assert not ran
        assert step.kind == "admit"
        return
    came_to, _, payload, _ = ran
    signature = bytes(data.ConsumeIntInRange(0, 3))
    revision = world.cores[0].revision
    encoded = pool.plain_answer(step.number, came_to, payload, signature, revision)
    answer = cpb.StepResponse.FromString(encoded)
    assert answer.SerializeToString(deterministic=True) == encoded
    assert answer.number == step.number
    assert answer.result.revision == revision
    assert answer.result.plan.payload == (payload or b"")
    if payload is not None:
        assert tpb.Plan.FromString(payload).number == step.number


PLAIN_CALLS: tuple[Call, ...] = (plain_step,)
