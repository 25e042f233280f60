"""Sequences that end with their plan: no Free, no second plan."""

from __future__ import annotations

import pytest

from kvplane import ops
from kvplane.errors import SequenceNotFoundError
from tests.helpers.core.core_messages import BLOCK
from tests.helpers.core.core_model import Engine, World

PROMPTS = [range(100 * i, 100 * i + BLOCK) for i in range(1, 5)]


def store(engine: Engine, *, first_id: int = 1) -> None:
    """Admit all prompts in one step, whose plan then runs; its receipt is kept."""
    answer = engine.step(
        *(ops.admit(first_id + i, each, ends_with_plan=True) for i, each in enumerate(PROMPTS))
    )
    assert not any(result.failures for result in answer.results)
    engine.run_all()


def test_with_the_receipt_the_blocks_are_cached_and_nothing_is_held() -> None:
    world = World()
    engine = world.engine()
    store(engine)
    assert world.usage()["held"] == 4
    engine.settle()
    usage = world.usage()
    assert (usage["held"], usage["retired"], usage["cached"]) == (0, 0, 4)
    assert all(engine.lookup([*each, 0]) == BLOCK for each in PROMPTS)
    world.core.check_integrity()
    # The next step that computes says that the tables are gone; a pin makes no plan for it.
    answer = engine.step(ops.pin(1, [PROMPTS[0]]))
    assert not answer.HasField("plan")
    engine.admit(1, range(900, 900 + BLOCK))
    assert world.usage()["held"] == 2
    world.core.check_integrity()


def test_it_ends_with_the_abort_of_its_plan_too_and_nothing_is_cached() -> None:
    world = World()
    engine = world.engine()
    engine.admit(9, range(40, 44))
    store(engine)
    engine.queue.clear()
    answer = engine.abort(engine.number)
    assert [engine.state(9).sequence_id] == [9]
    with pytest.raises(SequenceNotFoundError):
        engine.state(1)
    assert len(answer.sequences.sequence_ids) == 8
    engine.do(ops.free([9]))
    assert world.usage()["held"] == world.usage()["retired"] == 0
    assert engine.lookup([*PROMPTS[0], 0]) == 0
    world.core.check_integrity()


def test_what_was_freed_or_admitted_anew_meanwhile_is_passed_over() -> None:
    world = World()
    engine = world.engine()
    store(engine)
    engine.step(ops.free([1, 2]), ops.admit(2, range(900, 910)))
    engine.run_all()
    engine.settle()
    assert engine.state(2).num_tokens == 10
    engine.do(ops.free([2]))
    assert world.usage()["held"] == 0
    world.core.check_integrity()


def test_a_fork_lives_on_and_a_later_plan_of_the_sequence_may_still_touch_its_blocks() -> None:
    world = World(num_device=4, num_host=0)
    engine, other = world.engine(), world.engine()
    engine.step(ops.admit(1, range(BLOCK + 2), ends_with_plan=True))
    engine.run_all()
    engine.step(ops.fork(1, 5), ops.append(1, [7], 1, first_positions=BLOCK + 2))
    engine.settle()  # of the first plan alone
    with pytest.raises(SequenceNotFoundError):
        engine.state(1)
    assert world.usage()["retired"] > 0
    assert other.admit(1, range(500, 500 + 2 * BLOCK)).results[0].failures
    engine.run_all()
    engine.settle()
    engine.do(ops.free([5]))
    assert world.usage()["held"] == world.usage()["retired"] == 0
    world.core.check_integrity()


def test_a_session_s_end_and_a_repeat_leave_nothing() -> None:
    world = World()
    engine = world.engine()
    store(engine)
    engine.settle()
    engine.repeat(engine.sent[-1])
    engine.repeat(engine.sent[0])
    store(engine, first_id=1)
    engine.close()
    world.pump()
    assert world.usage()["held"] == world.usage()["retired"] == 0
    world.core.check_integrity()
