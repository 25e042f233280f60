"""A thousand sessions on one prefix, and forks of forks of forks: what one of them does costs as
much as with few of them, and does not recurse.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest

from control_plane.config import CoreConfig
from kvplane import ops
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import BLOCK, POOL, pack
from tests.helpers.core.core_model import Engine, World

FEW, MANY = 100, 1000
PREFIX_BLOCKS = 256
DEPTH = 1000
NUM_TIMED, NUM_TRIES = 40, 5
MOST_TIMES = 3.0
"""A step among ten times as many sessions may take, by the same measure; noise is less than that,
and a step that went through all sessions or their tables would take ten times as long.
"""

PREFIX = pack(range(PREFIX_BLOCKS * BLOCK))


class Sharers:
    """Sessions of one core, each with a sequence that begins with the same prefix."""

    def __init__(self) -> None:
        config = CoreConfig(watermark=0.0, max_sessions=MANY + 1)
        self.world = World(num_device=4096, num_host=0, config=config)
        self.engines: list[Engine] = []
        self._last_id = 1

    @property
    def num_token_chunks(self) -> int:
        return self.world.core._pools[POOL].primary.num_token_chunks

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

    def num_calls(self) -> list[int]:
        """Python functions that the core calls for each of these steps of one session."""
        counted = []
        for operation in self.operations():
            num = 0

            def count(frame: FrameType, event: str, argument: object) -> None:
                nonlocal num
                num += event == "call"

            request = request_of(self.engines[FEW // 2], operation)
            gc.disable()  # a collection calls what others have asked it to call
            sys.setprofile(count)
            try:
                result = answer(self.engines[FEW // 2], request)
            finally:
                sys.setprofile(None)
                gc.enable()
            take_plan(self.engines[FEW // 2], result)
            counted.append(num)
        return counted

    def plan_bytes(self) -> list[int]:
        """How long the plans of these steps are."""
        results = [send(self.engines[0], operation) for operation in self.operations()]
        return [len(result.plan.payload) for result in results]

    def cpu_s(self) -> float:
        """Of many such steps of one session, the fastest of each kind."""
        engine = self.engines[FEW // 2]
        fastest = [float("inf")] * len(self.operations())
        for _ in range(NUM_TIMED):
            for kind, operation in enumerate(self.operations()):
                request = request_of(engine, operation)
                begin = time.process_time()
                result = answer(engine, request)
                fastest[kind] = min(fastest[kind], time.process_time() - begin)
                take_plan(engine, result)
        return sum(fastest)


def request_of(engine: Engine, *operations: cpb.Operation) -> cpb.StepRequest:
    """The next step, with the receipts of those before."""
    engine.number += 1
    receipts, engine.receipts = engine.receipts, []
    return cpb.StepRequest(
        session=engine.ref, number=engine.number, operations=operations, receipts=receipts
    )


def answer(engine: Engine, request: cpb.StepRequest) -> cpb.StepResponse:
    return engine.world.core.step(request, engine.tenant)


def take_plan(engine: Engine, result: cpb.StepResponse) -> None:
    """All must have been done. The plan counts as run."""
    assert not any(operation.failures for operation in result.results)
    if result.HasField("plan"):
        (shard,) = engine.world.shards
        plan = plan_pb2.Plan.FromString(result.plan.payload)
        engine.receipts.append(shard.receipt(plan, signing.digest(result.plan.payload)))


def send(engine: Engine, *operations: cpb.Operation) -> cpb.StepResponse:
    """A step, past the engine's model of what it holds."""
    result = answer(engine, request_of(engine, *operations))
    take_plan(engine, result)
    return result


def test_a_thousand_sessions_on_one_prefix_cost_no_more_than_a_hundred() -> None:
    sharers = Sharers()
    sharers.grow_to(FEW)
    few_s = sharers.cpu_s()
    num_chunks, num_calls = sharers.num_token_chunks, sharers.num_calls()
    plan_bytes = sharers.plan_bytes()
    sharers.grow_to(MANY)
    assert sharers.world.usage()["held"] == PREFIX_BLOCKS + MANY, "one block for each of them"
    assert sharers.num_token_chunks - num_chunks == MANY - FEW, "and one chunk of tokens"
    assert sharers.num_calls() == num_calls
    assert sharers.plan_bytes() == plan_bytes
    ratios = []
    while not ratios or ratios[-1] > MOST_TIMES:
        assert len(ratios) < NUM_TRIES, ratios
        ratios.append(sharers.cpu_s() / few_s)
    sharers.world.core.check_integrity()


# Forks of forks.


def chain(depth: int) -> Engine:
    """An engine whose sequence 1 has a fork, which has a fork, and so on, all of other tokens."""
    engine = World(num_device=depth + 8, num_host=0).engine()
    send(engine, ops.admit(1, pack(range(2 * BLOCK + 1))))
    for i in range(2, depth + 1):
        send(engine, ops.fork(i - 1, i))
        send(engine, ops.append(i, pack([i]), 1, first_positions=2 * BLOCK + 1))
        send(engine, ops.truncate(i, 2 * BLOCK + 1))
    return engine


def parents_first(ids: list[int]) -> list[int]:
    return ids


def children_first(ids: list[int]) -> list[int]:
    return ids[::-1]


def in_any_order(ids: list[int]) -> list[int]:
    return random.Random(1).sample(ids, len(ids))


@pytest.mark.parametrize("order", [parents_first, children_first, in_any_order])
def test_a_chain_of_a_thousand_forks_ends_in_any_order(
    order: Callable[[list[int]], list[int]],
) -> None:
    engine = chain(DEPTH)
    core, ids = engine.world.core, list(range(1, DEPTH + 1))
    assert engine.world.usage()["held"] == 2 + DEPTH
    assert [engine.table(i)[:2] for i in (1, DEPTH // 2, DEPTH)] == [engine.table(1)[:2]] * 3
    core.check_integrity()
    for i in range(0, DEPTH, 50):
        send(engine, ops.free(order(ids)[i : i + 50]))
    send(engine)
    core.check_integrity()
    assert engine.world.usage()["held"] == 0
    assert not any(engine.world.observed().num_sequences.values())
    send(engine, ops.admit(1, pack(range(2 * BLOCK + 1))))


def test_a_chain_of_a_thousand_forks_is_made_by_one_operation() -> None:
    """The next plan is of whole tables, in which each is a fork of the one before."""
    engine = World(num_device=16, num_host=0).engine()
    send(engine, ops.admit(1, pack(range(2 * BLOCK + 1))))
    parents = list(range(1, DEPTH))
    send(engine, ops.fork(parents, [i + 1 for i in parents]))
    assert engine.world.usage()["held"] == 3
    request = cpb.AbortPlansRequest(whole_tables=True, session=engine.ref, number=engine.number + 1)
    engine.number += 1
    whole = engine.world.core.abort_plans(request, engine.tenant)
    (shard,) = engine.world.shards
    plan = plan_pb2.Plan.FromString(whole.plan.payload)
    engine.receipts = [shard.receipt(plan, signing.digest(whole.plan.payload))]
    send(engine, ops.append(DEPTH, pack([5]), 1, first_positions=2 * BLOCK + 1))
    assert engine.world.usage()["held"] == 4
    engine.world.core.check_integrity()
    send(engine, ops.free(range(1, DEPTH + 1)))
    send(engine)
    assert engine.world.usage()["held"] == 0
    engine.world.core.check_integrity()
