"""A pool and its sessions, as the control plane has them, and values that random bytes choose.

Numbers of steps, plans and slots are as the control plane gives them, and what it ends before all
else of a session is ended first here too. Everything else is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplane_blocks import LayerGroup, Pool

from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb

if TYPE_CHECKING:
    from atheris import FuzzedDataProvider

DEVICE, HOST = 1, 2
NUM_BLOCKS, MANY_BLOCKS = 10, 140
POLICIES = ("lru", "reuse-rate")
OWNERS = {b"a": 1, b"b": 2, b"c": 1, b"": 3}
"""Of each root: as a tenant has its namespaces."""
EXTREMES = (-(2**63), -1, 0, 2**31 - 1, 2**31, 2**63 - 1)
MOST = 2**63 - 1
REFUSALS = (ValueError, IndexError, KeyError)
"""What a caller is told of; ColumnError is a ValueError."""


@dataclass(eq=False)
class Session:
    """An open session: its last number, and the plan whose receipt was taken in part. ``is_due``:
    whole tables are being written for the step.
    """

    handle: int
    number: int = 1
    receipting: int | None = None
    aborting: bool | None = None  # whether it keeps tables
    is_swapping: bool = False
    is_due: bool = False


Call = Callable[["World", Session], None]


@contextmanager
def granted() -> Iterator[None]:
    """Nothing in here may be refused."""
    try:
        yield
    except REFUSALS as error:
        raise AssertionError(f"it was refused: {error}") from error


def number(data: FuzzedDataProvider, most: int) -> int:
    """A small number, or an extreme one."""
    found: int = data.ConsumeIntInRange(0, most + len(EXTREMES))
    return found if found <= most else EXTREMES[found - most - 1]


def column(data: FuzzedDataProvider, width: int, num: int, most: int) -> bytes:
    """``num`` elements, or now and then any bytes."""
    if data.ConsumeIntInRange(0, 31) == 31:
        return bytes(data.ConsumeBytes(data.ConsumeIntInRange(0, 24)))
    top = 8 * width - 1
    values = (min(max(number(data, most), -(1 << top)), (1 << top) - 1) for _ in range(num))
    return b"".join(value.to_bytes(width, "little", signed=True) for value in values)


def ints(packed: bytes, width: int) -> list[int]:
    """The whole elements of a column."""
    ends = range(width, len(packed) + 1, width)
    return [int.from_bytes(packed[i - width : i], "little", signed=True) for i in ends]


def settings(data: FuzzedDataProvider) -> dict[str, Any]:
    """What is the same in all groups of a pool."""
    return {
        "eviction_policy": data.PickValueInList([*POLICIES]),
        "max_sequences": 8,
        "max_table_entries": 64,
        "max_owner_blocks": data.PickValueInList([0, 0, 6]),
    }


def new_core(
    data: FuzzedDataProvider,
    block_tokens: int,
    same: dict[str, Any],
    *,
    may_hold_states: bool = False,
) -> LayerGroup:
    """One layer group. ``may_hold_states``: whether it may be one of checkpoints."""
    holds_states = may_hold_states and data.ConsumeBool()
    return LayerGroup(
        block_tokens,
        data.PickValueInList([NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS // 2, MANY_BLOCKS]),
        data.ConsumeIntInRange(0, 6),
        window_tokens=0 if holds_states else data.PickValueInList([0, 0, 3]),
        holds_states=holds_states,
        **same,
    )


class World:
    """One pool, of one layer group or several, and two sessions."""

    def __init__(
        self, data: FuzzedDataProvider, cores: Sequence[LayerGroup], block_tokens: int
    ) -> None:
        self.data, self.cores, self.block_tokens = data, cores, block_tokens
        self.pool: Any = Pool([*cores])
        self.sessions = [self.open(b"a"), self.open(b"a")]
        self.ending: list[int] = []
        self.ended: list[int] = []
        self.now_s = 0.0
        self.followers: dict[bytes, Any] = {}

    def open(self, root: bytes) -> Session:
        """A session whose first step has begun."""
        with granted():
            session = Session(self.pool.open_session(root, OWNERS[root]))
            self.pool.begin(session.handle, session.number)
        return session

    # Values

    def number(self, most: int) -> int:
        return number(self.data, most)

    def unsigned(self, most: int, num_bits: int) -> int:
        return self.number(most) % (1 << num_bits)

    def column(self, width: int, num: int, most: int) -> bytes:
        return column(self.data, width, num, most)

    def ids(self, num: int) -> bytes:
        return self.column(8, num, 9)

    def root(self) -> bytes:
        return bytes(self.data.PickValueInList([*OWNERS]))

    def tier(self) -> int:
        """Nearly always there is such a one."""
        return self.data.PickValueInList([DEVICE, DEVICE, DEVICE, HOST, HOST, HOST, 0, 3])

    def core(self) -> LayerGroup:
        return self.data.PickValueInList([*self.cores])

    def some_ids(self, session: Session, num: int) -> bytes:
        """Mostly of sequences that there are."""
        known = ints(self.pool.states(session.handle, None)[0], 8)
        if not known or self.data.ConsumeIntInRange(0, 7) == 7:
            return self.ids(num)
        chosen = (self.data.PickValueInList(known) for _ in range(num))
        return b"".join(each.to_bytes(8, "little", signed=True) for each in chosen)

    def some_id(self, session: Session) -> int:
        found = ints(self.some_ids(session, 1), 8)
        return found[0] if found else 0

    def tokens(self, most: int) -> bytes:
        """Any number of one token."""
        num = self.data.ConsumeIntInRange(0, most)
        return self.column(4, 1, 2) * num

    def prefix(self) -> bytes:
        """Whole blocks, with which other prompts begin too."""
        data = self.data
        num_blocks = data.ConsumeIntInRange(1, 5)
        return bytes([data.PickValueInList([0, 0, 1, 2]), 0, 0, 0]) * num_blocks * self.block_tokens

    def prompt(self) -> bytes:
        """As ``prefix``, and some tokens of another kind."""
        data = self.data
        return self.prefix() + bytes([data.ConsumeIntInRange(0, 3), 0, 0, 0]) * (
            data.ConsumeIntInRange(0, 6)
        )

    def positions(self, session: Session, ids: bytes) -> bytes:
        """Where the sequences are, mostly."""
        states = self.pool.states(session.handle, None)
        known, scheduled = ints(states[0], 8), ints(states[3], 4)
        where = dict(zip(known, scheduled, strict=True))
        if self.data.ConsumeIntInRange(0, 15) == 15:
            return self.column(4, len(ids) // 8, 20)
        return b"".join(where.get(i, 0).to_bytes(4, "little") for i in ints(ids, 8))

    # Steps

    def finish(self, session: Session) -> None:
        """End the step; its plan can be read, and its answer has it."""
        with granted():
            payload = self.pool.finish(session.handle, b"")
        session.is_due = False
        if payload is not None:
            plan = plan_pb2.Plan.FromString(payload)
            assert plan.number == session.number, plan
        encoded, step_at = self.pool.answer(session.number, b"", payload or b"", b"signed", 1, b"")
        result = cpb.StepResponse.FromString(encoded[step_at:])
        assert result.plan.payload == (payload or b"")

    def begin(self, session: Session) -> None:
        session.number += 1
        with granted():
            self.pool.begin(session.handle, session.number)

    def settle(self, session: Session) -> None:
        """What was done in part comes before all else of the session."""
        if session.receipting is not None:
            with granted():
                self.pool.receipted(session.handle, session.receipting)
            session.receipting = None
        if session.aborting is not None:
            with granted():
                self.pool.abort(session.handle, session.number + 1, session.aborting)
            session.aborting = None
            self.begin(session)
        if session.is_swapping:
            with granted():
                assert self.pool.swap_some(session.handle, MOST) is not None
            session.is_swapping = False
        if session.is_due:
            self.finish(session)
            self.begin(session)

    def end_all(self) -> None:
        """Release what is left of sessions that have ended."""
        with granted():
            for handle in self.ending:
                assert not self.pool.end_some(handle, MOST)
        self.ended += self.ending
        self.ending.clear()

    # What holds

    def check(self) -> None:
        """Whatever was called: counts are right, and the groups are in step."""
        for core in self.cores:
            core.check_integrity()
            for tier in (DEVICE, HOST):
                num_blocks, *parts = core.usage(tier)
                assert min(parts) >= 0
                assert sum(parts) == num_blocks, (num_blocks, parts)
        for handle in (session.handle for session in self.sessions):
            # All of a sequence but its blocks is the same in each group.
            first, *others = (
                (
                    core.states(handle, None)[:6],
                    Pool([core]).plans_in_flight(handle),
                    Pool([core]).last_plan(handle),
                )
                for core in self.cores
            )
            assert all(other == first for other in others), (first, others)


def make_calls(world: World, calls: Sequence[Call], *, unsettled: Sequence[Call] = ()) -> None:
    """As many as the input has bytes for. ``unsettled``: which may come between parts."""
    data = world.data
    while data.remaining_bytes():
        call = calls[data.ConsumeIntInRange(0, len(calls) - 1)]
        session = world.sessions[data.ConsumeIntInRange(0, len(world.sessions) - 1)]
        if call not in unsettled:
            world.settle(session)
        with suppress(*REFUSALS):
            call(world, session)
    world.check()
