"""The plans of the operations on a real data plane: every output of attention is compared, so what
was truncated, shared or brought back from the host tier is where the plans say.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplane import ControlClient, DataClient, ops
from tests.helpers.both_planes import POOL, Planes
from tests.helpers.checked_engine import Engine
from tests.helpers.data.plan_author import LAYOUT
from tests.helpers.waiting import until

SIZES = {"num_device_blocks": 8, "num_host_blocks": 4}


@pytest.mark.parametrize("begins", [True, False], ids=["at once", "one by one"])
async def test_a_sequence_lives_its_whole_life(tmp_path: Path, begins: bool) -> None:
    """Over each transport, whether plans are waited for or not."""
    async with (
        Planes(tmp_path, LAYOUT, data=SIZES, watermark=0.0) as planes,
        ControlClient(planes.address) as client,
        client.open_session(POOL) as session,
        DataClient(planes.data.address, shared_memory=begins) as remote,
        await remote.open(session.grant) as execution,
    ):
        await live(Engine(session, execution, begins=begins), planes)


async def live(engine: Engine, planes: Planes) -> None:
    await engine.step(ops.admit(1, range(20)), spans=[(0, 20)])
    await engine.step(ops.append(1, [20], 1, first_positions=20), spans=[(20, 1)])
    await engine.step(ops.fork(1, 2), spans=[])
    both = [ops.append(i, [21], 1, first_positions=21) for i in (2, 1)]
    await engine.step(*both, spans=[(21, 1), (21, 1)])
    await engine.step(ops.swap([1, 2], "host"), spans=[])
    await engine.step(ops.swap([1, 2], "device"), spans=[])
    last = ops.append(2, [22], 1, first_positions=22)
    await engine.step(last, ops.free([1]), spans=[(22, 1)])
    hit = await engine.step(ops.admit(3, range(20)), spans=[(16, 4)])
    assert hit.results[0].admit.num_cached_tokens == 16
    executor = planes.data.executor
    counters = executor.counters.num_transferred_blocks
    assert all(counters[direction] > 0 for direction in ("copy", "swap_out", "swap_in"))
    assert executor.blocks.num_published == 2
    await engine.session.close()
    await until(lambda: executor.num_sessions == 0)  # it is fenced
    await until(lambda: executor.num_sequences == 0)
