"""What a step may cost, counted in calls of Python functions, which are the same on every machine.

Time is for ``benchmarks/control_plane`` to tell; here it is only held that no work is done block by
block, or for every sequence, where it can be done at once.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType

from kvplane import ops
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import BLOCK, changes_of, pack
from tests.helpers.core.core_model import Engine, World

FEW, MANY = 16, 512  # blocks


def new_engine() -> Engine:
    return World(num_device=4 * MANY, num_host=0).engine()


def counted_step(engine: Engine, *operations: cpb.Operation) -> tuple[cpb.StepResponse, int]:
    """The next step, all receipts submitted before, and how many Python functions it called in the
    core, comprehensions included.
    """
    engine.settle()
    engine.number += 1
    request = cpb.StepRequest(session=engine.ref, number=engine.number, operations=operations)
    num = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num
        num += event == "call"

    gc.disable()  # a collection calls what others have asked it to call
    sys.setprofile(count)
    try:
        result = engine.world.core.step(request, engine.tenant)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert not any(operation.failures for operation in result.results)
    return result, num


def prompt(num_blocks: int, *, seed: int = 0) -> bytes:
    """One token more than the blocks hold, so that all of them can be found cached."""
    return pack([seed + i for i in range(num_blocks * BLOCK + 1)])


def calls_to_admit(num_blocks: int, *, cached: bool) -> int:
    engine = new_engine()
    if cached:
        engine.admit(1, range(num_blocks * BLOCK + 1))
    result, num = counted_step(engine, ops.admit(2, prompt(num_blocks)))
    (operation,) = result.results
    assert operation.admit.num_cached_tokens == num_blocks * BLOCK * cached
    return num


def test_a_new_prompt_costs_no_call_a_block() -> None:
    assert calls_to_admit(MANY, cached=False) == calls_to_admit(FEW, cached=False)


def test_a_prompt_found_in_use_costs_no_call_a_block() -> None:
    assert calls_to_admit(MANY, cached=True) == calls_to_admit(FEW, cached=True)


def test_a_cached_prompt_that_nobody_uses_costs_no_call_a_block() -> None:
    calls = []
    for num_blocks in (FEW, MANY):
        engine = new_engine()
        engine.admit(1, range(num_blocks * BLOCK + 1))
        engine.send(ops.free([1]))
        engine.settle()
        assert engine.world.usage()["cached"] == num_blocks
        calls.append(counted_step(engine, ops.admit(2, prompt(num_blocks)))[1])
    assert calls[0] == calls[1]


def test_a_step_is_blind_to_the_sequences_that_it_does_not_name() -> None:
    calls = []
    for num_others in (0, 100):
        engine = new_engine()
        engine.admit(1, [1])
        for i in range(num_others):
            engine.admit(2 + i, [2 + i])
        calls.append(counted_step(engine, engine.growth(1, [5], 1))[1])
    assert calls[0] == calls[1]


def calls_to_decode(num_sequences: int, first_position: int) -> int:
    engine = new_engine()
    ids = range(1, num_sequences + 1)
    for i in ids:
        engine.admit(i, [i] * first_position)
    append = ops.append(ids, pack(ids), 1, first_positions=first_position, num_tokens=1)
    return counted_step(engine, append)[1]


def test_a_decode_step_costs_no_call_a_sequence() -> None:
    for first_position in (BLOCK - 1, BLOCK):  # in their blocks, and each into a new one
        assert calls_to_decode(256, first_position) == calls_to_decode(2, first_position)


def test_a_plan_does_not_change_with_the_table_that_it_was_made_of() -> None:
    engine = new_engine()
    engine.step(ops.admit(1, prompt(2)))
    made = engine.queue[0]
    before = changes_of(made.plan)
    engine.step(engine.growth(1, num_slots=3 * BLOCK))
    engine.step(ops.free([1]))
    engine.step(ops.admit(2, prompt(4, seed=9)))
    assert changes_of(type(made.plan).FromString(made.signed.payload)) == before
