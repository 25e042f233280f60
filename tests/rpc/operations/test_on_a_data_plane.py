"""The plans of the operations on a real data plane: every output of attention is compared, so what
was truncated, trimmed, shared or brought back from the host tier is where the plans say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, Layout, ops
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.checked_engine import Engine
from tests.helpers.data.data_server import config_of
from tests.helpers.data.plan_author import LAYOUT
from tests.helpers.waiting import until

POOL = "pool"
BLOCK = LAYOUT.block_size_tokens
StartEngine = Callable[..., Awaitable[tuple[Engine, DataPlaneServer]]]


@pytest.fixture
async def start_engine(
    tmp_path: Path, start_control_plane: Callable[..., Awaitable[ControlPlaneServer]]
) -> AsyncIterator[StartEngine]:
    """An engine of both planes, with eight device and four host blocks."""
    async with AsyncExitStack() as stack:

        async def start(
            window_tokens: int = 0, *, shared_memory: bool = True, begins: bool = False
        ) -> tuple[Engine, DataPlaneServer]:
            control = await start_control_plane(watermark=0.0)
            layout = windowed(window_tokens)
            data = await DataPlaneServer.start(config_of(tmp_path, control.address, layout))
            stack.push_async_callback(data.stop)
            stack.callback(data.executor.check_integrity)
            await asyncio.wait_for(data.registered.wait(), 20)
            client = await stack.enter_async_context(ControlClient(control.address))
            remote = await stack.enter_async_context(
                DataClient(data.address, shared_memory=shared_memory)
            )
            session = await stack.enter_async_context(await client.open_session(POOL, layout))
            execution = await stack.enter_async_context(await remote.open(session.grant))
            return Engine(session, execution, window_tokens, begins=begins), data

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


async def test_rejected_tokens_are_written_over(start_engine: StartEngine) -> None:
    engine, _ = await start_engine()
    await engine.step(ops.admit(1, range(12)), spans=[(0, 12)])
    drafts = ops.append(1, [90, 91, 92, 93, 94, 95], 6, first_positions=12, num_lookahead_slots=4)
    await engine.step(drafts, spans=[(12, 6)])
    await engine.step(ops.truncate(1, 14), spans=[])
    await engine.step(ops.append(1, range(14, 20), 6, first_positions=14), spans=[(14, 6)])
    await grow(engine, 20, 25)


async def test_a_published_block_that_was_truncated_is_copied_and_left_to_others(
    start_engine: StartEngine,
) -> None:
    engine, _ = await start_engine()
    await engine.step(ops.admit(1, range(17)), spans=[(0, 17)])
    await engine.step(ops.admit(2, range(20)), spans=[(16, 4)])
    await engine.step(ops.truncate(1, 12), spans=[])
    await engine.step(ops.append(1, [77] * 3, 3, first_positions=12), spans=[(12, 3)])
    await engine.step(ops.append(2, [20], 1, first_positions=20), spans=[(20, 1)])
    await engine.step(ops.admit(3, range(18)), spans=[(16, 2)])


async def test_sequences_of_one_prompt_write_apart(start_engine: StartEngine) -> None:
    engine, _ = await start_engine()
    await engine.step(ops.admit(1, range(20), fork_sequence_ids=[2, 3]), spans=[(0, 20)])
    for position in (20, 21):
        appends = [ops.append(i, [40 * i], 1, first_positions=position) for i in (1, 2, 3)]
        await engine.step(*appends, spans=[(position, 1)] * 3)


async def test_equal_prompts_of_one_step_are_computed_once(start_engine: StartEngine) -> None:
    engine, _ = await start_engine()
    admits = ops.admit(1, range(20)), ops.admit(2, range(20))
    result = await engine.step(*admits, spans=[(0, 20), (16, 4)])
    assert result.results[1].admit.num_cached_tokens == 16
    both = [ops.append(i, [40 * i], 1, first_positions=20) for i in (1, 2)]
    await engine.step(*both, spans=[(20, 1)] * 2)


async def test_attention_sees_the_window_and_its_blocks_alone(start_engine: StartEngine) -> None:
    engine, data = await start_engine(window_tokens=BLOCK + 3)
    await engine.step(ops.admit(1, range(20)), spans=[(0, 20)])
    await grow(engine, 20, 100)  # more tokens than the pool has slots for
    assert data.executor.num_sequences == 1
    await engine.step(ops.fork(1, 2), spans=[])
    both = [ops.append(i, [100 + i], 1, first_positions=101) for i in (1, 2)]
    await engine.step(*both, spans=[(101, 1), (101, 1)])


async def test_a_prefix_comes_back_from_the_host_tier(start_engine: StartEngine) -> None:
    engine, data = await start_engine()
    await engine.step(ops.admit(1, range(33)), spans=[(0, 33)])
    await engine.step(ops.free(1), spans=[])
    await engine.session.submit_receipts()
    other = [500 + position for position in range(64)]
    await engine.step(ops.admit(2, other), spans=[(0, 64)])
    await engine.step(ops.free(2), spans=[])
    hit = await engine.step(ops.admit(3, range(35)), spans=[(32, 3)])
    assert hit.results[0].admit.num_cached_tokens == 32
    plan = plan_pb2.Plan.FromString(hit.plan.payload)
    assert list(plan.transfers.source_tiers).count(tpb.TIER_HOST) == 4
    assert data.executor.counters.num_transferred_blocks["swap_in"] >= 4
