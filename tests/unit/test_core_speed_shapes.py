"""What a step may cost, counted in calls of Python functions, which are the same on every machine.

Time is for ``benchmarks/core_step.py`` to tell; here it is only held that no work is done block by
block, or for every sequence, where it can be done at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from core_data_plane import LAYOUT, pack

from control_plane.planning.core import ControlPlane
from control_plane.planning.model import (
    Admit,
    AdmitResult,
    Append,
    CoreConfig,
    Free,
    Hello,
    Operation,
    Plan,
    Receipt,
    SealedPlan,
    Shard,
    Status,
    StepOutcome,
    Tier,
)
from control_plane.server import codec

FEW, MANY = 16, 512  # blocks
BLOCK = LAYOUT.block_size_tokens
WHOLE = Shard(num_layers=1, num_kv_heads=1)


class Engine:
    """One session on a core that encodes and signs; its plans run at once."""

    def __init__(self, seal: Callable[[bytes, Plan], SealedPlan] = codec.seal) -> None:
        self.core = ControlPlane(incarnation=1, config=CoreConfig(), clock=lambda: 0.0, seal=seal)
        self.core.register(Hello("pool", WHOLE, 1, LAYOUT, 4 * MANY, 0, "localhost:1"))
        self.core.report("pool", 0, 1, (), last=True, max_session_id=0)
        self.id = self.core.open_session("pool", LAYOUT.fingerprint, "ann").session_id
        self.number = 0
        self.receipts: list[Receipt] = []

    def step(self, *operations: Operation) -> StepOutcome:
        """The next step, with the last one's receipt."""
        self.number += 1
        receipts, self.receipts = self.receipts, []
        content = str(self.number).encode()
        outcome = self.core.step(self.id, "ann", self.number, operations, receipts, content=content)
        assert all(result.status is Status.OK for result in outcome.results)
        if outcome.plan is not None:
            self.receipts.append(Receipt(self.id, self.number, outcome.plan.digest, 0, 1, 1))
        return outcome

    def settle(self) -> None:
        """Hand in the last step's receipt."""
        receipts, self.receipts = self.receipts, []
        self.core.step(self.id, "ann", 0, (), receipts, content=b"")

    def counted_step(self, *operations: Operation) -> tuple[StepOutcome, int]:
        """The next step, and how many Python functions it called, comprehensions included."""
        num = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num
            num += event == "call"

        sys.setprofile(count)
        try:
            outcome = self.step(*operations)
        finally:
            sys.setprofile(None)
        return outcome, num


def prompt(num_blocks: int, *, seed: int = 0) -> bytes:
    """One token more than the blocks hold, so that all of them can be found cached."""
    return pack([seed + i for i in range(num_blocks * BLOCK + 1)])


def calls_to_admit(num_blocks: int, *, cached: bool) -> int:
    engine = Engine()
    if cached:
        engine.step(Admit(1, prompt(num_blocks)))
        engine.settle()
    outcome, num = engine.counted_step(Admit(2, prompt(num_blocks)))
    done = outcome.results[0].done
    assert isinstance(done, AdmitResult)
    assert done.num_cached_tokens == num_blocks * BLOCK * cached
    return num


def test_a_new_prompt_costs_no_call_a_block() -> None:
    assert calls_to_admit(MANY, cached=False) == calls_to_admit(FEW, cached=False)


def test_a_prompt_found_in_use_costs_no_call_a_block() -> None:
    assert calls_to_admit(MANY, cached=True) == calls_to_admit(FEW, cached=True)


def test_a_cached_prompt_costs_one_call_a_block_to_leave_the_eviction_order() -> None:
    calls = []
    for num_blocks in (FEW, MANY):
        engine = Engine()
        admit = Admit(2, prompt(num_blocks))
        engine.step(Admit(1, admit.token_ids))
        engine.step(Free(1))
        engine.settle()
        usage = engine.core.describe_pool("pool").usage[0]
        assert usage.num_cached_blocks == num_blocks
        calls.append(engine.counted_step(admit)[1])
    assert calls[1] - calls[0] <= MANY - FEW


def test_a_step_is_blind_to_the_sequences_that_it_does_not_name() -> None:
    calls = []
    for num_others in (0, 100):
        engine = Engine()
        engine.step(Admit(1, pack([1])))
        for i in range(num_others):
            engine.step(Admit(2 + i, pack([2 + i])))
        calls.append(engine.counted_step(Append(1, pack([5]), num_slots=1))[1])
    assert calls[0] == calls[1]


def test_a_plan_does_not_change_with_the_table_that_it_was_made_of() -> None:
    plans: list[tuple[Plan, str]] = []

    def seal(key: bytes, plan: Plan) -> SealedPlan:
        plans.append((plan, repr(plan)))
        return codec.seal(key, plan)

    engine = Engine(seal)
    engine.step(Admit(1, prompt(2)))
    engine.step(Append(1, b"", num_slots=3 * BLOCK))
    engine.step(Free(1))
    engine.step(Admit(2, prompt(4, seed=9)))
    assert [repr(plan) for plan, _ in plans] == [text for _, text in plans]


def test_blocks_in_columns_are_blocks_one_by_one() -> None:
    engine = Engine()
    engine.step(Admit(1, prompt(3)))
    refs, _ = engine.core.block_table(engine.id, "ann", 1)
    pool = engine.core._pools["pool"]
    assert tuple(pool.refs(Tier.DEVICE, [ref.index for ref in refs])) == refs
