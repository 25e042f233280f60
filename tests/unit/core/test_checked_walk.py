"""A check says what the step that follows answers, and changes nothing, in random states.

Two cores get the same requests; one of them is checked before each step. The other is never asked,
and must answer every request alike, to the byte: a check that changed anything shows sooner or
later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random, SystemRandom
from typing import Any, Final

import pytest

from control_plane import queries
from control_plane.sessions.session import Session
from control_plane.steps.operations import OPERATIONS
from kvplane import ops
from kvplane.errors import KvplaneError
from kvplane.layout import LayerGroup
from kvplane.results import SequenceState, sequence_states
from kvplane.slices import run_to_end
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.error_messages import to_wire
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_messages import POOL, receipt_of
from tests.helpers.core.core_model import World, deferred_of, tokens_written
from tests.helpers.planning.registration_messages import LAYOUT

PAIRS_OF_A_WORLD = 250
_OWNERS = (("ann", ""), ("ann", ""), ("ann", "adapter"), ("bob", ""))
_TWO_GROUPS = replace(
    LAYOUT,
    groups=(
        LayerGroup("full", (0, 2), 2, 8),
        LayerGroup("window", (1, 3), 2, 8, sliding_window_tokens=20),
    ),
)
# What fills a pool: an operation of each row as often as of another would leave it empty.
_BUSY = ("admit", "admit", "admit", "append", "append", "swap", "fork")
# The clock stands still but for these, so that turns end, and sequences have to yield.
_PAUSES_S = (0.01, 0.3, 1.1, 6.0, 12.0)


@dataclass
class Caller:
    """A client: its session in both cores, and the last number that it used."""

    ref: tpb.SessionRef
    tenant: str
    number: int = 0


class CheckedWalk:
    """Both cores with one pool each, and their callers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.seen: Counter[str] = Counter()
        num_blocks, num_host = rng.randint(6, 16), rng.choice((0, 3, 8))
        settings = {
            "lease_s": 120.0,
            "max_plans_in_flight": rng.choice((1, 2, 3, 3)),
            "watermark": rng.choice((0.0, 0.1, 0.2)),
            "max_operations": 8,
            "max_sequences": rng.choice((4, 65_536)),
            "max_table_entries": rng.choice((20, 4_194_304)),
            "max_tenant_blocks": rng.choice((0, 0, num_blocks // 2)),
            "max_retained_share": rng.choice((0.25, 0.1)),
            "eviction_policy": rng.choice(("lru", "reuse-rate")),
        }
        self.layout = rng.choice((LAYOUT, LAYOUT, _TWO_GROUPS))
        device, host = (num_blocks,), (num_host,)
        if self.layout is _TWO_GROUPS:
            device, host = (num_blocks, max(4, num_blocks - 3)), (num_host, num_host // 2)
        self.most_tokens = num_blocks * LAYOUT.block_size_tokens
        self.worlds = [
            World(num_device=device, num_host=host, layout=self.layout, plane=Plane, **settings)
            for _ in range(2)
        ]
        self.checked = self.worlds[0].core
        self.callers = [self._open(owner) for owner in _OWNERS[: rng.randint(2, 4)]]

    # Requests, which both cores answer alike

    def walk(self, num_pairs: int) -> None:
        """Send steps of one operation after their checks, with other events between them."""
        num_done = 0
        try:
            while num_done < num_pairs:
                if self.rng.random() < 0.5:
                    self.event()
                else:
                    self.pair(num_done)
                    num_done += 1
            for world in self.worlds:
                world.core.check_integrity()
        except Exception as error:
            error.add_note(f"seed {self.seed}, after {num_done} pairs: CheckedWalk({self.seed})")
            raise

    def pair(self, num_done: int) -> None:
        """Check an operation, then send it as a step."""
        caller = self.rng.choice(self.callers)
        operation = self.operation(caller, list(OPERATIONS)[num_done % len(OPERATIONS)])
        other = self.operation(caller, self.rng.choice(list(OPERATIONS)))
        self.check(caller, other)  # one that no step follows
        foreseen = self.check(caller, operation)
        answered = self.call(caller, "step", cpb.StepRequest(operations=[operation]))
        if isinstance(answered, KvplaneError):
            failures, admitted = failures_of(answered), cpb.AdmitResult()
        else:
            (result,) = answered.results
            failures, admitted = list(result.failures), result.admit
        assert foreseen == (failures, admitted), (operation, foreseen, failures)
        self.note(operation, failures)

    def check(
        self, caller: Caller, operation: cpb.Operation
    ) -> tuple[list[cpb.ItemFailure], cpb.AdmitResult]:
        """Return what a check of the first core says."""
        request = cpb.StepRequest(session=caller.ref, operations=[operation], validate_only=True)
        try:
            (result,) = run_to_end(self.checked.validate(request, caller.tenant)).results
        except KvplaneError as error:
            result = cpb.OperationResult(failures=failures_of(error))
        return list(result.failures), result.admit

    def note(self, operation: cpb.Operation, failures: list[cpb.ItemFailure]) -> None:
        """Count what kind of answer an operation got."""
        name = operation.WhichOneof("operation")
        for failure in failures:
            if failure.HasField("shortage"):
                reason = cpb.ShortageReason.Name(failure.shortage.reason)
                status = cpb.ItemStatus.Name(failure.status)
                self.seen[f"{name}: {status.split('_')[-1]} {reason.split('_')[-1]}"] += 1
            else:
                self.seen[f"{name}: {failure.error.reason}"] += 1
        if not failures:
            self.seen[f"{name}: OK"] += 1

    def call(self, caller: Caller, method: str, request: Any) -> Any:
        """Return the answer or the error of a numbered request."""
        caller.number += 1
        request.session.CopyFrom(caller.ref)
        request.number = caller.number
        return self.both(method, request, caller.tenant)

    def both(self, method: str, *args: Any) -> Any:
        """Return the answer or the error of both cores."""
        outcomes: list[Any] = []
        for world in self.worlds:
            try:
                outcomes.append(getattr(world.core, method)(*args))
            except KvplaneError as error:
                outcomes.append(error)
        one, other = outcomes
        if isinstance(one, KvplaneError):
            assert repr(one) == repr(other), "the checks before changed something"
        else:
            assert one == other, "the checks before changed something"
        return one

    # What happens between

    def event(self) -> None:
        """Change the state otherwise than by a pair."""
        caller = self.rng.choice(self.callers)
        dice = self.rng.random()
        if dice < 0.45:
            self.submit(caller)
        elif dice < 0.8:
            self.submit(caller)
            names = self.rng.choices(_BUSY, k=self.rng.randint(1, 3))
            operations = [self.operation(caller, name) for name in names]
            self.call(caller, "step", cpb.StepRequest(operations=operations))
        elif dice < 0.93:
            self.pass_time()
        elif dice < 0.96:
            self.call(caller, "abort_plans", cpb.AbortPlansRequest(whole_tables=True))
        elif dice < 0.98:
            if plans := list(self.session(caller).plans):
                request = cpb.AbortPlansRequest(plan_number=self.rng.choice(plans))
                self.call(caller, "abort_plans", request)
        elif len(self.callers) > 2:
            self.both("close_session", caller.ref, caller.tenant)
            self.replace([caller])
        self.deliver()

    def submit(self, caller: Caller) -> None:
        """Submit the receipts of some plans, all of them most of the time, and some tokens."""
        session = self.session(caller)
        plans = list(session.plans)
        if self.rng.random() < 0.2:
            plans = plans[: self.rng.randint(0, len(plans))]
        request = cpb.StepRequest(receipts=[receipt_of(session, n) for n in plans])
        if self.rng.random() < 0.5:
            states = sequence_states(queries.states(session))
            request.deferred_tokens.CopyFrom(deferred_of(states))
        self.call(caller, "step", request)

    def pass_time(self) -> None:
        """Let leases be renewed and time pass; sequences may be cut and sessions ended."""
        for caller in self.callers:
            self.both("renew_session", caller.ref, caller.tenant)
        pause_s = self.rng.choice(_PAUSES_S)
        for world in self.worlds:
            world.clock.now += pause_s
        self.both("tick")
        open_ids = self.checked.sessions.by_id.keys()
        self.replace([c for c in self.callers if c.ref.session_id not in open_ids])

    def replace(self, gone: Iterable[Caller]) -> None:
        """Open other sessions for those that have ended."""
        for caller in gone:
            self.callers.remove(caller)
            self.callers.append(self._open(self.rng.choice(_OWNERS)))

    def deliver(self) -> None:
        """Take the messages for the data plane, which fences at once, and do work that is left."""
        for world in self.worlds:
            world.pump()
            while world.core.work():
                pass
            world.core.check_integrity()

    def _open(self, owner: tuple[str, str]) -> Caller:
        tenant, namespace = owner
        request = cpb.OpenSessionRequest(
            pool_id=POOL, layout=self.layout.to_proto(), namespace=namespace
        )
        return Caller(self.both("open_session", request, tenant).session, tenant)

    # What operations are made of

    def session(self, caller: Caller) -> Session:
        return self.checked.sessions.by_id[caller.ref.session_id]

    def operation(self, caller: Caller, name: str) -> cpb.Operation:
        """Return a random operation of one item, of a row of ``OPERATIONS``."""
        session = self.session(caller)
        waiting: list[int] = []
        if session.queued is not None and session.queued.message is not None:
            message = session.queued.message
            waiting = [message.sequence_id, *columns.read(INT64, message.fork_sequence_ids, "")]
        known = Known(
            live={s.sequence_id: s for s in sequence_states(queries.states(session))},
            waiting=waiting,
            cut=list(session.revoked),
            most_tokens=self.most_tokens,
        )
        return operation_of(name, self.rng, known)


def failures_of(error: KvplaneError) -> list[cpb.ItemFailure]:
    """Return the error of a whole request as that of its only item."""
    wire = to_wire(error)
    wire.ClearField("next_number")  # a check has no number
    return [cpb.ItemFailure(status=cpb.ITEM_STATUS_FAILED, error=wire)]


# Random operations, most of them possible

_LAST_ID: Final = 7


@dataclass(frozen=True)
class Known:
    """A session's live sequences by id, the ids that wait to be admitted, and those that were cut.
    ``most_tokens``: those of the whole device tier.
    """

    live: Mapping[int, SequenceState]
    waiting: Sequence[int]
    cut: Sequence[int]
    most_tokens: int


def operation_of(name: str, rng: Random, known: Known) -> cpb.Operation:
    """Return an operation of this name; sometimes a column of it has a byte too many."""
    operation = _MAKERS[name](rng, known)
    if rng.random() < 0.03:
        message = getattr(operation, name)
        columns = [f.name for f, value in message.ListFields() if isinstance(value, bytes)]
        if columns:
            column = rng.choice(columns)
            setattr(message, column, getattr(message, column) + b"\0")
    return operation


def _rarely(rng: Random, wrong: Any, usual: Any) -> Any:
    return wrong if rng.random() < 0.04 else usual


def _live_id(rng: Random, known: Known) -> int:
    """Return the id of a live sequence; sometimes another."""
    others = [*known.waiting, *known.cut, rng.randint(1, _LAST_ID), rng.choice((0, -1, 99))]
    if not known.live or rng.random() < 0.12:
        return rng.choice(others)
    return rng.choice(list(known.live))


def _new_id(rng: Random, known: Known) -> int:
    """Return an id that is not live; sometimes another."""
    unused = [i for i in range(1, _LAST_ID + 1) if i not in known.live]
    if not unused or rng.random() < 0.08:
        return rng.choice([*known.live, *known.waiting, 0])
    return rng.choice([*unused, *known.waiting, *known.waiting])


def _prompt(rng: Random, known: Known) -> list[int]:
    """Return a prompt that shares its beginning with half of the others."""
    num = rng.choice((1, 7, 8, 9, 16, 17, 24, 24, 33, 33, 48))
    if rng.random() < 0.06:
        num = known.most_tokens + rng.choice((-8, 0, 1))
    tokens = [rng.randrange(2)] * num + rng.choice(([], [], [2], [3, 2]))
    if rng.random() < 0.02:
        tokens[rng.randrange(len(tokens))] = -1
    return tokens[: rng.choice((0, 99))] if rng.random() < 0.02 else tokens


def _admit(rng: Random, known: Known) -> cpb.Operation:
    return ops.admit(
        _new_id(rng, known),
        _prompt(rng, known),
        num_compute_tokens=_rarely(rng, -1, rng.choice((None, None, None, 0, 8, 11))),
        max_total_tokens=_rarely(rng, rng.choice((-1, known.most_tokens + 1)), rng.choice((0, 48))),
        skip_prefix_lookup=rng.random() < 0.1,
        fork_sequence_ids=[_new_id(rng, known) for _ in range(rng.choice((0, 0, 0, 1, 2)))],
        wait=rng.random() < 0.5,
    )


def _append(rng: Random, known: Known) -> cpb.Operation:
    sequence_id = _live_id(rng, known)
    state = known.live.get(sequence_id)
    first = state.num_scheduled_tokens if state is not None else 0
    num_slots = _rarely(rng, known.most_tokens, rng.choice((0, 1, 1, 1, 2, 8, 10, 24)))
    written = tokens_written(state) if state is not None else []
    tokens = written + [rng.randrange(2) for _ in range(num_slots)]
    tokens = tokens[: rng.choice((0, len(written), len(tokens)))]
    if rng.random() < 0.05:
        first, num_slots = first + rng.choice((-1, 0, 1)), num_slots * rng.choice((1, -1))
    if tokens and rng.random() < 0.03:
        tokens[-1] = -5
    return ops.append(
        sequence_id,
        tokens,
        num_slots,
        first_positions=first,
        num_tokens=_rarely(rng, rng.choice((-1, len(tokens) + 1)), None),
        num_lookahead_slots=_rarely(rng, -1, rng.choice((0, 0, 0, 0, 3, 9, 30))),
    )


def _fork(rng: Random, known: Known) -> cpb.Operation:
    return ops.fork(_live_id(rng, known), _new_id(rng, known))


def _free(rng: Random, known: Known) -> cpb.Operation:
    return ops.free(_live_id(rng, known))


def _truncate(rng: Random, known: Known) -> cpb.Operation:
    sequence_id = _live_id(rng, known)
    state = known.live.get(sequence_id)
    most = max(state.num_tokens, state.num_scheduled_tokens) if state is not None else 9
    return ops.truncate(sequence_id, most - rng.choice((-1, 0, 1, 3, 9, most)))


def _ids_of(rng: Random, known: Known, tier: int) -> list[int]:
    """Return ids of sequences of a tier, most of the time."""
    of_tier = [i for i, state in known.live.items() if state.tier == tier]
    if not of_tier or rng.random() < 0.1:
        return [_live_id(rng, known) for _ in range(rng.randint(0, 2))]
    ids = rng.sample(of_tier, rng.randint(1, min(2, len(of_tier))))
    return ids + ids[:1] if rng.random() < 0.05 else ids


def _swap(rng: Random, known: Known) -> cpb.Operation:
    if rng.random() < 0.5:
        return ops.swap(_ids_of(rng, known, tpb.TIER_DEVICE), "host")
    return ops.swap(_ids_of(rng, known, tpb.TIER_HOST), "device")


_MAKERS: Final[dict[str, Callable[[Random, Known], cpb.Operation]]] = {
    "admit": _admit,
    "append": _append,
    "fork": _fork,
    "free": _free,
    "truncate": _truncate,
    "swap": _swap,
}


# What must have been seen

OFTEN_SEEN = (
    *(f"{name}: OK" for name in OPERATIONS),
    *(f"{name}: INVALID_REQUEST" for name in OPERATIONS if name != "free"),
    *(f"admit: LATER {why}" for why in ("BLOCKS", "GROWTH", "QUEUE")),
    *(f"fork: {why}" for why in ("QUOTA_EXCEEDED", "SEQUENCE_EXISTS", "SEQUENCE_NOT_FOUND")),
    *(f"swap: {why}" for why in ("LATER BLOCKS", "NEVER BLOCKS", "SEQUENCE_SWAPPED")),
    "admit: SEQUENCE_EXISTS",
    "append: LATER BLOCKS",
    "append: SEQUENCE_SWAPPED",
    "append: TOO_MANY_PLANS_IN_FLIGHT",
    "swap: LATER QUEUE",
)
SELDOM_SEEN = (
    *(f"{name}: LATER {why}" for name in ("admit", "swap") for why in ("HEADROOM", "QUOTA")),
    *(f"append: {why}" for why in ("LATER QUOTA", "NEVER BLOCKS", "NEVER QUOTA")),
    *(f"{name}: SEQUENCE_REVOKED" for name in ("append", "fork", "truncate")),
    *(f"admit: NEVER {why}" for why in ("BLOCKS", "QUOTA")),
    "free: INVALID_REQUEST",
    "swap: LATER GROWTH",
)


def walk_worlds(first_seed: int, num_worlds: int) -> Counter[str]:
    """Walk in worlds of these seeds; return how often each kind of answer was seen."""
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_worlds):
        walk = CheckedWalk(seed)
        walk.walk(PAIRS_OF_A_WORLD)
        seen += walk.seen
    return seen


def assert_seen(seen: Counter[str], kinds: tuple[str, ...]) -> None:
    """Assert that there was an answer of each kind, or the walk proves nothing of it."""
    missing = [kind for kind in kinds if not seen[kind]]
    assert not missing, seen


def test_a_check_says_what_the_step_answers() -> None:
    assert_seen(walk_worlds(0, 12), OFTEN_SEEN)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_check_says_what_the_step_answers_in_many_worlds() -> None:
    """Takes 10^5 pairs, other ones each night. A failure is printed with its seed."""
    assert_seen(walk_worlds(SystemRandom().randrange(2**40), 400), OFTEN_SEEN + SELDOM_SEEN)
