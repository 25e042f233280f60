"""Pools of two layer groups, one of them with a window. The walk over both planes has such pools in
random states (``tests/helpers/planes``), and that over the native core more of them.
"""

from __future__ import annotations

from typing import Any

from kvplane import ops
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_model import Engine, World, only
from tests.helpers.planes import planes_engine, planes_machine, planes_world
from tests.helpers.planes.planes_values import BLOCK, TWO_GROUPS, WINDOW


def engine_of(device: tuple[int, int], **settings: Any) -> Engine:
    """Return the only engine of a pool with these device blocks in each group."""
    groups: dict[str, Any] = {"num_device": device, "num_host": (0, 0), "layout": TWO_GROUPS}
    return World(**groups, plane=Plane, max_plans_in_flight=3, **settings).engine()


def held(engine: Engine) -> list[int]:
    return [engine.world.usage(group=group)["held"] for group in (0, 1)]


def tables(engine: Engine, sequence_id: int) -> list[list[int]]:
    """Return the blocks of a sequence in each group; -1 for one that was trimmed."""
    listed = engine._about(sequence_id, with_tables=True).tables
    return [columns.read(INT32, table.indices, "").tolist() for table in listed]


def decode(engine: Engine, sequence_id: int, num: int) -> None:
    for i in range(num):
        assert not only(engine.append(sequence_id, i % 7)).failures


def test_a_group_with_a_window_gives_back_what_lies_behind_it() -> None:
    engine = engine_of((16, 6))
    engine.admit(1, range(40))
    assert held(engine) == [5, 5]
    decode(engine, 1, 60)
    full, window = held(engine)
    assert full == 13
    assert window <= -(-WINDOW // BLOCK) + 2
    num_trimmed = [indices.count(-1) for indices in tables(engine, 1)]
    assert num_trimmed[0] == 0 and num_trimmed[1] >= 9
    engine.do(ops.free([1]))
    assert held(engine) == [0, 0]


def test_a_quota_holds_in_each_group() -> None:
    engine = engine_of((16, 12), max_tenant_blocks=6)
    engine.admit(1, range(33))

    def check_refused(operation: cpb.Operation, status: cpb.ItemStatus) -> None:
        before = engine.everything()
        (failure,) = only(engine.step(operation)).failures
        quota = cpb.SHORTAGE_REASON_QUOTA
        assert (failure.status, failure.shortage.reason) == (status, quota)
        assert engine.everything() == before

    check_refused(ops.admit(2, range(300, 317)), cpb.ITEM_STATUS_LATER)
    check_refused(ops.admit(2, range(300, 349)), cpb.ITEM_STATUS_NEVER)
    decode(engine, 1, 15)
    assert held(engine) == [6, 3], "the window's group has room for more"
    check_refused(ops.append(1, [5], 1, first_positions=48), cpb.ITEM_STATUS_NEVER)


def test_an_abort_that_leaves_one_group_nothing_begins_again_in_all() -> None:
    engine, prompt = engine_of((16, 12)), list(range(57))
    engine.admit(1, prompt[:25])  # three blocks are published
    engine.step(ops.admit(2, prompt))
    engine.step(ops.admit(3, [*prompt, 1]))  # shares what sequence 2 computes
    of_third = tables(engine, 3)
    assert [len(indices) for indices in of_third] == [8, 8]
    assert of_third[1][:4] == [-1] * 4
    engine.abort(min(engine.session.plans))
    # The window of the third sees what was never written.
    assert [engine.state(i).num_written_tokens for i in (1, 2, 3)] == [25, 24, 0]
    engine.world.core.check_integrity()


def test_an_abort_leaves_no_group_with_more_published_than_written() -> None:
    """One group found a prefix that the other had to wait for, and the plan was aborted."""
    engine, prompt = engine_of((16, 6)), list(range(24))
    engine.cache(prompt)
    engine.cache(range(100, 148))  # of the first prompt the window's group has nothing any more
    engine.step(ops.admit(3, [*prompt, 1]))
    before = tables(engine, 3)
    result = only(engine.step(ops.admit(4, [*prompt, 2])))
    assert result.admit.num_cached_tokens == 24
    full, window = tables(engine, 4)
    assert full[:3] != before[0][:3], "it is found where it was cached"
    assert window[:3] == before[1][:3], "it is what the third sequence computes"
    engine.abort(min(engine.session.plans))
    engine.world.core.check_integrity()
    assert [engine.state(i).num_written_tokens for i in (3, 4)] == [0, 0]


def test_a_new_control_plane_finds_what_was_cached() -> None:
    world = planes_world.World(layout=TWO_GROUPS)
    engine = planes_engine.Engine(world, world.control, ("ann", ""))
    for operation in (ops.admit(1, range(41)), ops.free([1])):
        engine.step(operation)
        engine.run_all()
    engine.step()
    world.deliver_all()
    world.restart_control(2)
    world.mend()
    engine = planes_engine.Engine(world, world.control, ("ann", ""))
    assert engine.lookup(range(41)) == 40
    planes_machine.end_all(world, [engine])
