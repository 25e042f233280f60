"""Steps that are run from bytes to bytes come to the state and the answers of the same steps that
are read as messages.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvplane_blocks import PlainStep

from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.sessions.numbering import content_of
from control_plane.sessions.session import Session
from control_plane.sharing.families import Family
from kvplane import ops
from kvplane.errors import KvplaneError
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32, INT64
from tests.helpers.planning.registration_messages import LAYOUT, hello

TENANT, POOL, KEY = "tenant", "pool", b"k" * 32
NUM_STEPS = 30
WINDOWED = replace(
    LAYOUT, groups=(LayerGroup("full", (0,), 2, 8), LayerGroup("window", (1,), 2, 8, 12))
)


class Side:
    """A core with two sessions. What it is asked, and the clock, are all that it depends on."""

    def __init__(self, layout: Layout, config: CoreConfig) -> None:
        ids = iter((5, 7))
        self.core = ControlPlane(
            incarnation=3,
            config=config,
            clock=lambda: 100.0,
            new_key=lambda: KEY,
            new_session_id=lambda: next(ids),
        )
        blocks = cpb.GroupBlocks(num_device_blocks=24, num_host_blocks=4)
        groups = [blocks for _ in layout.groups] if len(layout.groups) > 1 else []
        self.core.register(
            hello(layout=layout.to_proto(), num_device_blocks=24, num_host_blocks=4, groups=groups)
        )
        self.core.report(POOL, 0, 11, cpb.BlockReport(last=True))
        while self.core.take_notified() is not None and self.core.has_work():
            self.core.work()
        opening = cpb.OpenSessionRequest(
            pool_id=POOL, protocol=protocol.supported(), layout=layout.to_proto()
        )
        self.refs = [self.core.open_session(opening, TENANT).session for _ in range(2)]
        self.num_plain = 0

    def ask(self, data: bytes, *, is_plain: bool) -> Any:
        """The answer's bytes, or the error."""
        step = PlainStep.read(data) if is_plain else None
        try:
            answer = None if step is None else self.core.plain_step(step, TENANT)
            if answer is not None:
                self.num_plain += 1
                return answer.encoded
            request = cpb.StepRequest.FromString(data)
            return self.core.step(request, TENANT).SerializeToString(deterministic=True)
        except KvplaneError as error:
            return type(error), error.message, error.field

    def state(self) -> list[Any]:
        """All that the two sides must have alike."""
        self.core.check_integrity()
        told = []
        for session in self.core._sessions.values():
            native, slot, numbers = session.native, session.handle, session.numbers
            states = native.states(slot, None)
            ids = columns.read(INT64, states[0], "ids")
            told += [
                states,
                [[group.table(slot, i) for group in session.pool.groups] for i in ids],
                [native.last_progress(slot, i) for i in ids],
                (session.done, session.receipted, session.plans, session.last_plan, numbers.last),
                (native.resync_due(slot), native.num_tokens_in_flight(slot)),
                {n: answer.content for n, answer in numbers._answers.items()},
                {i: len(group.members) for i, group in _groups(self.core, session).items()},
            ]
        pool = self.core._pools[POOL]
        self.core.take_notified()
        self.core.announce()
        self.core.take_notified()
        outgoing = [each.SerializeToString() for each in self.core.take_outgoing(POOL, 0)]
        return [*told, outgoing, pool.revision(), pool.usage().SerializeToString(), pool._count()]


def _groups(core: ControlPlane, session: Session) -> dict[int, Family]:
    return core._sharing[POOL].members[session.id].families._by_id


class Walk:
    """The same requests for both sides."""

    def __init__(self, rng: Random, layout: Layout = LAYOUT, **config: Any) -> None:
        self.rng = rng
        bounds = {"max_operations": 8, "max_plans_in_flight": 2, "watermark": 0.0}
        configured = CoreConfig(**{**bounds, **config})
        self.sides = Side(layout, configured), Side(layout, configured)
        self.sent: list[cpb.StepRequest] = []

    def send(self, request: cpb.StepRequest) -> Any:
        """To both sides, whose answers and states must be alike. Returns the answer."""
        data = request.SerializeToString()
        assert PlainStep.read(data) is None or PlainStep.read(data).content == content_of(request)
        answers = [side.ask(data, is_plain=i > 0) for i, side in enumerate(self.sides)]
        assert answers[0] == answers[1]
        assert self.sides[0].state() == self.sides[1].state()
        self.sent.append(request)
        return answers[0]

    def step(self) -> None:
        """A step, most often one that decodes."""
        rng, session = self.rng, self.rng.choice([*self.sides[0].core._sessions.values()])
        if self.sent and rng.random() < 0.1:
            self.send(rng.choice(self.sent[-3:]))
            return
        states = session.native.states(session.handle, None)
        ids = columns.read(INT64, states[0], "ids")
        ends = dict(zip(ids, columns.read(INT64, states[3], "ends"), strict=True))
        kinds = ["append", "admit", "free", "fork", "none", "several"]
        operations = {
            "append": lambda: [self._append(ends)],
            "admit": lambda: [self._admit()],
            "free": lambda: [ops.free([rng.choice([*ids, 99])])],
            "fork": lambda: [ops.fork(rng.choice([*ids, 99]), rng.randint(1, 9))],
            "none": list,
            "several": lambda: [self._append(ends), self._append(ends)],
        }[rng.choices(kinds, [9, 4, 1, 1, 2, 1])[0]]()
        request = cpb.StepRequest(
            session=session.ref,
            number=session.numbers.last + rng.choices([1, 2, 0], [20, 1, 1])[0],
            operations=operations,
            receipts=[self._receipt(session, n) for n in self._receipted(session)],
        )
        if rng.random() < 0.05:
            request.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
        if rng.random() < 0.02:
            request.session.session_id += 1
        self.send(request)

    def abort(self) -> None:
        """Abort the newest plan of a session."""
        session = self.rng.choice([*self.sides[0].core._sessions.values()])
        if session.plans:
            request = cpb.AbortPlanRequest(
                session=session.ref,
                number=session.numbers.last + 1,
                plan_number=max(session.plans),
            )
            for side in self.sides:
                side.core.abort_plan(request, TENANT)

    def _admit(self) -> cpb.Operation:
        rng = self.rng
        tokens = range(rng.choice([0, 0, 7]), rng.choices([0, 8, 30, 80, 300], [1, 9, 9, 9, 1])[0])
        return cpb.Operation(
            admit=cpb.Admit(
                sequence_id=rng.randint(0, 9),
                token_ids=columns.pack(INT32, tokens) + b"\0" * (rng.random() < 0.05),
                max_total_tokens=rng.choices([0, 50, 2**41, -1], [20, 2, 1, 1])[0],
                wait=rng.random() < 0.4,
                skip_prefix_lookup=rng.random() < 0.1,
            )
        )

    def _append(self, ends: dict[int, int]) -> cpb.Operation:
        rng = self.rng
        ids = [i for i in ends if rng.random() < 0.8] or [99]
        if rng.random() < 0.1:
            ids += rng.choices([*ends, 99], k=rng.choice([1, 8]))
        slots = [rng.choices([1, 0, 9], [20, 1, 1])[0] for _ in ids]
        numbers = [max(0, num - (rng.random() < 0.1)) for num in slots]
        firsts = [ends.get(i, 0) + (rng.random() < 0.03) for i in ids]
        tokens = [rng.randint(-1 if rng.random() < 0.02 else 0, 3) for _ in range(sum(numbers))]
        append = cpb.Append(
            sequence_ids=columns.pack(INT64, ids),
            first_positions=columns.pack(INT64, firsts),
            num_slots=columns.pack(INT32, slots),
            num_tokens=columns.pack(INT32, numbers),
            token_ids=columns.pack(INT32, tokens),
        )
        if rng.random() < 0.05:
            append.num_lookahead_slots = columns.pack(INT32, [1] * len(ids))
        if rng.random() < 0.05:
            append.token_ids += b"\0" * rng.randint(1, 4)
        if rng.random() < 0.03:
            append.first_positions = append.first_positions[:-8]
        return cpb.Operation(append=append)

    def _receipted(self, session: Any) -> list[int]:
        plans = [n for n in session.plans if self.rng.random() < 0.7]
        if self.rng.random() < 0.1:
            plans.append(self.rng.randint(0, session.numbers.last + 1))
        return plans

    def _receipt(self, session: Any, number: int) -> tpb.SignedPayload:
        record = session.plans.get(number)
        payload = tpb.Receipt(
            version=protocol.PAYLOAD_VERSION,
            session=session.ref,
            pool_id=POOL,
            epoch=11,
            plan_number=number,
            plan_digest=record.digest if record else bytes(32),
        ).SerializeToString()
        key = KEY if self.rng.random() < 0.95 else bytes(32)
        kind = signing.RECEIPT if self.rng.random() < 0.97 else signing.PLAN
        signature = signing.sign(key, signing.RECEIPT, payload)
        return tpb.SignedPayload(type=kind, payload=payload, signature=signature)


def walked(rng: Random, layout: Layout = LAYOUT, **config: Any) -> Walk:
    walk = Walk(rng, layout, **config)
    for _ in range(NUM_STEPS):
        walk.step()
        if rng.random() < 0.05:
            walk.abort()
    return walk


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_plain_steps_do_what_steps_do(rng: Random, has_groups: bool, watermark: float) -> None:
    walked(rng, WINDOWED if has_groups else LAYOUT, watermark=watermark)


@pytest.mark.nightly
@settings(max_examples=500)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_many_plain_steps_do_what_steps_do(rng: Random, has_groups: bool, watermark: float) -> None:
    walked(rng, WINDOWED if has_groups else LAYOUT, watermark=watermark)


def test_plain_steps_stand_in_line_as_others_do() -> None:
    walk = Walk(Random(1))
    first, second = walk.sides[0].core._sessions.values()

    def admit(session: Session, sequence_id: int, num_tokens: int, *, wait: bool = False) -> Any:
        operation = ops.admit(sequence_id, range(num_tokens), wait=wait, skip_prefix_lookup=wait)
        number = session.numbers.last + 1
        request = cpb.StepRequest(session=session.ref, number=number, operations=[operation])
        return cpb.StepResponse.FromString(walk.send(request)).result.results[0]

    assert admit(first, 1, 160).HasField("admit")
    assert admit(second, 1, 80, wait=True).failures[0].shortage.place_in_line == 1
    num_plain = walk.sides[1].num_plain
    assert admit(first, 2, 8).failures, "it fits, but another waits"
    assert walk.sides[1].num_plain == num_plain


def test_an_admission_that_is_asked_for_again_and_again_is_plain() -> None:
    walk = Walk(Random(1))
    first, second = walk.sides[0].core._sessions.values()

    def ask(session: Session, sequence_id: int, num_tokens: int) -> cpb.OperationResult:
        operation = ops.admit(sequence_id, range(sequence_id, num_tokens))
        number = session.numbers.last + 1
        request = cpb.StepRequest(session=session.ref, number=number, operations=[operation])
        return cpb.StepResponse.FromString(walk.send(request)).result.results[0]

    assert ask(first, 1, 160).HasField("admit")
    for _ in range(3):
        [failure] = ask(second, 2, 80).failures
        assert failure.status == cpb.OPERATION_STATUS_LATER
    assert ask(second, 2, 30).HasField("admit")
    assert walk.sides[1].num_plain == 5
    assert ask(second, 3, 300).failures[0].status == cpb.OPERATION_STATUS_NEVER
    assert walk.sides[1].num_plain == 5, "what is not for now is left to messages"


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["one group", "two"])
def test_most_steps_of_a_walk_are_plain(layout: Layout) -> None:
    walks = [walked(Random(seed), layout) for seed in range(3)]
    assert sum(walk.sides[1].num_plain for walk in walks) > NUM_STEPS
