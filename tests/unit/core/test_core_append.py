"""Append: many sequences in columns, each item for itself."""

from __future__ import annotations

import random

import pytest

from control_plane.config import CoreConfig
from kvplane import ops
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_machine import growth, joined
from tests.helpers.core.core_messages import BLOCK, changes_of, pack
from tests.helpers.core.core_model import World


@pytest.mark.parametrize("seed", range(20))
def test_items_of_one_operation_do_what_operations_of_one_item_do(seed: int) -> None:
    together, apart = World(num_device=12).engine(), World(num_device=12).engine()
    for engine in (together, apart):
        for i in range(1, 5):
            engine.admit(i, [i] * (BLOCK - 2 + i), max_total_tokens=24)
        engine.send(ops.fork(1, 5))
        engine.settle()
    rng = random.Random(seed)
    for _ in range(10):
        items = [growth(rng, together, i) for i in rng.choices(range(1, 6), k=4)]
        (many,) = together.step(joined(items)).results
        ones = apart.step(*items).results
        failures = {item: one.failures[0] for item, one in enumerate(ones) if one.failures}
        assert [failure.item for failure in many.failures] == list(failures)
        assert [failure.status for failure in many.failures] == [
            failure.status for failure in failures.values()
        ]
        assert many.num_table_blocks == b"".join(one.num_table_blocks for one in ones)
        plans = [made.signed.payload for made in together.queue]
        assert plans == [made.signed.payload for made in apart.queue]
        for engine in (together, apart):
            engine.run_all()
            engine.settle()
            engine.world.core.check_integrity()


def only(result: cpb.StepResponse) -> cpb.OperationResult:
    (operation,) = result.results
    return operation


def test_items_of_one_operation_fail_one_by_one_in_sparse_failures() -> None:
    world = World(config=CoreConfig(watermark=0.0, max_sequences=7))
    engine = world.engine()
    for i in range(1, 6):
        engine.admit(i, [i] * 6)
    append = ops.append(
        [1, 9, 2, 3, 1, 4],
        pack([10, 11, 12, 13, 14, 15, 16, 17]),
        [1, 1, 1, 1, 1, 0],
        first_positions=[6, 6, 6, 5, 7, 6],
        num_tokens=[1, 1, 1, 1, 1, 3],
    )
    forks = ops.fork([5, 9, 5, 5, 5], [6, 7, 5, 7, 8])
    frees = ops.free([4, 4, 1, 6])
    appended, forked, freed = engine.step(append, forks, frees).results
    assert [failure.item for failure in appended.failures] == [1, 3, 4]
    assert [failure.error.field for failure in appended.failures] == [
        "operations[0].append.sequence_ids[1]",
        "operations[0].append.first_positions[3]",
        "operations[0].append.num_slots[4]",
    ]
    assert columns.read(INT32, appended.num_table_blocks, "").tolist() == [1, 0, 1, 0, 0, 1]
    assert [failure.item for failure in forked.failures] == [1, 2, 4]
    assert forked.failures[2].error.reason == "QUOTA_EXCEEDED"
    assert columns.read(INT32, forked.num_table_blocks, "").tolist() == [1, 0, 0, 1, 0]
    assert [failure.error.reason for failure in freed.failures] == [
        "SEQUENCE_NOT_FOUND",
        "SEQUENCE_BUSY",
    ]
    assert columns.read(INT32, freed.num_released_blocks, "").tolist() == [1, 0, 0, 0]
    plan = engine.queue[-1].plan
    assert columns.read(INT64, plan.spans.sequence_ids, "").tolist() == [1, 2]
    assert columns.read(INT32, plan.spans.first_positions, "").tolist() == [6, 6]
    assert engine.state(1).num_tokens == 7
    engine.run_all()
    engine.settle()
    engine.check()
    world.core.check_integrity()


def test_a_negative_token_spoils_its_own_item_alone() -> None:
    engine = World().engine()
    engine.admit(1, range(4))
    engine.admit(2, range(4))
    appended = only(engine.step(ops.append([1, 2], [-5, 5], 1, first_positions=4, num_tokens=1)))
    assert [failure.item for failure in appended.failures] == [0]
    assert appended.failures[0].error.field == "operations[0].append.token_ids[0]"
    assert engine.state(2).num_tokens == 5


def test_an_item_that_crosses_into_a_new_block_is_told_to_the_data_plane() -> None:
    engine = World().engine()
    engine.admit(1, range(BLOCK - 1))
    engine.admit(2, range(20, 20 + BLOCK))
    operation = ops.append(
        [1, 2], pack([7, 28]), 1, first_positions=[BLOCK - 1, BLOCK], num_tokens=1
    )
    result = engine.step(operation)
    appended = only(result)
    assert not appended.failures
    assert columns.read(INT32, appended.num_table_blocks, "num_blocks").tolist() == [1, 2]
    (change,) = changes_of(plan_pb2.Plan.FromString(result.plan.payload))
    assert (change.sequence_id, change.first_block, change.allocated) == (2, 1, [True])
