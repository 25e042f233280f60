"""The plans of the operations on a real data plane: every output of attention is compared, so what
was truncated, trimmed, shared or brought back from the host tier is where the plans say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, Layout, ops
from tests.helpers.both_planes import POOL, Planes
from tests.helpers.checked_engine import Engine
from tests.helpers.data.plan_author import LAYOUT
from tests.helpers.waiting import until

BLOCK = LAYOUT.block_size_tokens
StartEngine = Callable[..., Awaitable[tuple[Engine, DataPlaneServer]]]


@pytest.fixture
async def start_engine(tmp_path: Path) -> AsyncIterator[StartEngine]:
    """An engine of both planes, with eight device and four host blocks."""
    async with AsyncExitStack() as stack:

        async def start(
            window_tokens: int = 0, *, shared_memory: bool = True, begins: bool = False
        ) -> tuple[Engine, DataPlaneServer]:
            layout, data = windowed(window_tokens), {"num_device_blocks": 8, "num_host_blocks": 4}
            planes = Planes(tmp_path, layout, data=data, watermark=0.0)
            planes = await stack.enter_async_context(planes)
            client = await stack.enter_async_context(ControlClient(planes.address))
            session = await stack.enter_async_context(client.open_session(POOL))
            remote = DataClient(planes.data.address, shared_memory=shared_memory)
            remote = await stack.enter_async_context(remote)
            execution = await stack.enter_async_context(await remote.open(session.grant))
            return Engine(session, execution, window_tokens, begins=begins), planes.data

        yield start


def windowed(window_tokens: int) -> Layout:
    return replace(LAYOUT, groups=(replace(LAYOUT.groups[0], sliding_window_tokens=window_tokens),))


async def grow(engine: Engine, first: int, last: int) -> None:
    """Compute positions ``first`` to ``last`` of sequence 1, one in each step."""
    for position in range(first, last + 1):
        append = ops.append(1, [position], 1, first_positions=position)
        await engine.step(append, spans=[(position, 1)])


@pytest.mark.parametrize("begins", [True, False], ids=["at once", "one by one"])
async def test_a_sequence_lives_its_whole_life(start_engine: StartEngine, begins: bool) -> None:
    """Over each transport, whether plans are waited for or not."""
    engine, data = await start_engine(shared_memory=begins, begins=begins)
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
    counters = data.executor.counters.num_transferred_blocks
    assert all(counters[direction] > 0 for direction in ("copy", "swap_out", "swap_in"))
    assert data.executor.blocks.num_published == 2
    await engine.session.close()
    await until(lambda: data.executor.num_sessions == 0)  # it is fenced
    await until(lambda: data.executor.num_sequences == 0)


async def test_attention_sees_the_window_and_its_blocks_alone(start_engine: StartEngine) -> None:
    engine, data = await start_engine(window_tokens=BLOCK + 3)
    await engine.step(ops.admit(1, range(20)), spans=[(0, 20)])
    await grow(engine, 20, 100)  # more tokens than the pool has slots for
    assert data.executor.num_sequences == 1
    await engine.step(ops.fork(1, 2), spans=[])
    both = [ops.append(i, [100 + i], 1, first_positions=101) for i in (1, 2)]
    await engine.step(*both, spans=[(101, 1), (101, 1)])
