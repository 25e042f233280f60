"""What a step may cost: calls of Python functions, which are the same on every machine, and where
time could grow with the number of sessions, that too.

No work is done block by block, for every sequence or for every session, where it can be done at
once; a thousand sessions on one prefix cost as little as a hundred.
"""

from __future__ import annotations

import gc
import sys
import time
from types import FrameType
from typing import Any

import pytest

from kvplane import ops
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_messages import BLOCK, pack
from tests.helpers.core.core_model import Engine, World, only

FEW_BLOCKS, MANY_BLOCKS = 16, 512


def world_of(num_device: int, **settings: Any) -> World:
    """Return a world whose data plane keeps no tables, which would take longer than the steps."""
    return World(num_device=num_device, num_host=0, plane=Plane, **settings)


def send(engine: Engine, *operations: cpb.Operation) -> cpb.StepResponse:
    """Send a step, of which all must be done, and run its plan."""
    result = engine.send(*operations)
    assert not any(operation.failures for operation in result.results)
    return result


def new_engine() -> Engine:
    """Return an engine whose first plan was signed, which costs more than the next."""
    engine = world_of(4 * MANY_BLOCKS).engine()
    send(engine, ops.admit(1, [1]))
    send(engine, ops.free([1]))
    return engine


def cost_of(
    engine: Engine, *operations: cpb.Operation, in_time: bool = False
) -> tuple[float, cpb.StepResponse]:
    """Return what the core alone takes for a step, and its answer: calls of Python functions,
    comprehensions included, or ``in_time`` seconds of the processor.
    """
    core, cost = engine.world.core, 0.0
    step = core.step

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal cost
        cost += event == "call"

    def measured(*arguments: Any) -> cpb.StepResponse:
        nonlocal cost
        gc.disable()  # a collection calls what others have asked it to call
        begin = time.process_time()
        sys.setprofile(None if in_time else count)
        try:
            return step(*arguments)
        finally:
            sys.setprofile(None)
            gc.enable()
            cost = time.process_time() - begin if in_time else cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "step", measured)
        result = send(engine, *operations)
    return cost, result


def prompt(num_blocks: int) -> bytes:
    """One token more than the blocks hold, so that all of them can be found cached."""
    return pack(range(num_blocks * BLOCK + 1))


@pytest.mark.parametrize("found", ["not at all", "in use", "that nobody uses"])
def test_an_admission_costs_no_call_a_block(found: str) -> None:
    calls = []
    for num_blocks in (FEW_BLOCKS, MANY_BLOCKS):
        engine = new_engine()
        if found != "not at all":
            send(engine, ops.admit(1, prompt(num_blocks)))
        if found == "that nobody uses":
            send(engine, ops.free([1]))
        send(engine)
        num, result = cost_of(engine, ops.admit(2, prompt(num_blocks)))
        num_cached = only(result).admit.num_cached_tokens
        assert num_cached == num_blocks * BLOCK * (found != "not at all")
        calls.append(num)
    assert calls[0] == calls[1]


def test_a_step_is_blind_to_the_sequences_that_it_does_not_name() -> None:
    calls = []
    for num_others in (0, 100):
        engine = new_engine()
        send(engine, ops.admit(1, [1]))
        send(engine, *(ops.admit(2 + i, [2 + i]) for i in range(num_others)))
        send(engine)
        calls.append(cost_of(engine, ops.append(1, [5], 1, first_positions=1))[0])
    assert calls[0] == calls[1]


@pytest.mark.parametrize("first_position", [BLOCK - 1, BLOCK])  # in their blocks, into new ones
def test_a_decode_step_costs_no_call_a_sequence(first_position: int) -> None:
    calls = []
    for num_sequences in (2, 256):
        engine, ids = new_engine(), range(1, num_sequences + 1)
        send(engine, *(ops.admit(i, [i] * first_position) for i in ids))
        send(engine)
        append = ops.append(ids, pack(ids), 1, first_positions=first_position, num_tokens=1)
        calls.append(cost_of(engine, append)[0])
    assert calls[0] == calls[1]


# Sessions that share a prefix

FEW, MANY = 100, 1000
PREFIX_BLOCKS = 256
PREFIX = pack(range(PREFIX_BLOCKS * BLOCK))
NUM_TIMED, NUM_TRIES = 40, 5
MOST_TIMES = 3.0
"""A step among ten times as many sessions may take, by the same measure; noise is less than that,
and a step that went through all sessions or their tables would take ten times as long.
"""


class Sharers:
    """Sessions of one core, each with a sequence that begins with the same prefix."""

    def __init__(self) -> None:
        self.world = world_of(4096, max_sessions=MANY + 1)
        self.engines: list[Engine] = []
        self._last_id = 1

    @property
    def num_token_chunks(self) -> int:
        return self.world.pool.primary.num_token_chunks

    def grow_to(self, num: int) -> None:
        """Open sessions, each of which finds the prefix, but for the first, which computes it."""
        while len(self.engines) < num:
            engine = self.world.engine()
            self.engines.append(engine)
            send(engine, ops.admit(1, PREFIX + pack([len(self.engines)])))
            send(engine)

    def operations(self) -> tuple[cpb.Operation, ...]:
        """What a session does, each in a step of its own: another sequence on the prefix, a token
        for it, a fork, and their ends.
        """
        self._last_id += 2
        one, fork = self._last_id, self._last_id + 1
        end = PREFIX_BLOCKS * BLOCK + 1
        return (
            ops.admit(one, PREFIX + pack([7])),
            ops.append(one, pack([8]), 1, first_positions=end),
            ops.fork(one, fork),
            ops.free([one, fork]),
        )

    def costs(self) -> list[tuple[float, int]]:
        """Calls and bytes of the plan, for each of these steps of one session."""
        engine = self.engines[FEW // 2]
        counted = [cost_of(engine, each) for each in self.operations()]
        return [(num, len(result.plan.payload)) for num, result in counted]

    def cpu_s(self) -> float:
        """Of many such steps of one session, the fastest of each kind."""
        engine = self.engines[FEW // 2]
        times = (
            [cost_of(engine, each, in_time=True)[0] for each in self.operations()]
            for _ in range(NUM_TIMED)
        )
        return sum(map(min, zip(*times, strict=True)))


def test_a_thousand_sessions_on_one_prefix_cost_no_more_than_a_hundred() -> None:
    sharers = Sharers()
    sharers.grow_to(FEW)
    few_s = sharers.cpu_s()
    num_chunks, costs = sharers.num_token_chunks, sharers.costs()
    sharers.grow_to(MANY)
    assert sharers.world.usage()["held"] == PREFIX_BLOCKS + MANY, "one block for each of them"
    assert sharers.num_token_chunks - num_chunks == MANY - FEW, "and one chunk of tokens"
    assert sharers.costs() == costs
    ratios = []
    while not ratios or ratios[-1] > MOST_TIMES:
        assert len(ratios) < NUM_TRIES, ratios
        ratios.append(sharers.cpu_s() / few_s)
    sharers.world.core.check_integrity()
