"""Every metric of docs/reference/metrics.md has a value on a live stack, or is named here."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvplane import (
    ControlClient,
    KvplaneError,
    Session,
    ops,
)
from kvplane.prefixes import ForgetScope
from kvplane.wire.v1.types_pb2 import SignedPayload
from scripts import reference
from tests.helpers.load import Load, execute
from tests.helpers.monitored_stack import ROOT, MonitoredStack
from tests.helpers.tools import needs

POOL = "default"
NUM_BLOCKS = 96
FILES = "needs a folder for files"
NOT_SEEN_HERE = {
    "kvplane_certificate_ends_timestamp_seconds": "needs a certificate",
    "kvplane_cleared_blocks_total": "needs blocks that pass from one tenant to another",
    "kvplane_device_memory_bytes": "needs a GPU",
    "kvplane_file_tier_blocks": FILES,
    "kvplane_file_tier_bytes": FILES,
    "kvplane_file_tier_misses_total": FILES,
    "kvplane_file_tier_moved_blocks_total": FILES,
    "kvplane_file_tier_removed_files_total": FILES,
    "kvplane_file_tier_write_errors_total": FILES,
    "kvplane_local_device_regions": "needs a GPU",
    "kvplane_missing_receipts": "needs a pool of several shards, one of which is silent",
}
TRAFFIC: dict[str, Any] = {"duration_s": 15, "num_sequences": 24, "num_prefixes": 12}
PATIENCE_S = 60.0


def empty(stack: MonitoredStack) -> set[str]:
    """The metrics of the planes that have had no value but 0 so far."""
    found = set()
    for title, _, declarations in reference.SECTIONS:
        if title in (reference.ENGINE, reference.ROUTER, reference.PUSHES):
            continue
        for declaration in declarations:
            name = declaration.name
            series = f"{name}_count" if declaration.kind == "histogram" else name
            values = stack.query(f"max(max_over_time({series}[1h]))")
            if not values or float(values[0]["value"][1]) == 0:
                found.add(name)
    return found


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_every_metric_has_a_value_or_is_named_with_why_not(tmp_path: Path) -> None:
    blocks = ["--num-device-blocks", str(NUM_BLOCKS), "--num-host-blocks", "32"]
    arguments = ["--model", str(ROOT / "models" / "recall"), *blocks]
    of_control = ["--lease-s", "3"]
    needs("prometheus", "promtool")
    with MonitoredStack(tmp_path, of_control, arguments, with_alertmanager=False) as stack:
        async with ControlClient(stack.control) as control:
            following = asyncio.create_task(follow(control))
            await Load(**TRAFFIC).run(control, POOL)
            await moves(control)
            await mistakes(control)
            await overload(control)
            stack.planes["data_plane"].kill()
            stack.start_plane("data_plane")
            await control.wait_ready(POOL, timeout_s=PATIENCE_S)
            await Load(**TRAFFIC).run(control, POOL)
            deadline_s = time.monotonic() + PATIENCE_S
            while (absent := await asyncio.to_thread(empty, stack)) != set(NOT_SEEN_HERE):
                assert absent >= set(NOT_SEEN_HERE), "seen after all"
                assert time.monotonic() < deadline_s, absent - set(NOT_SEEN_HERE)
                await asyncio.sleep(1)
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


async def follow(control: ControlClient) -> None:
    await control.wait_ready(POOL, timeout_s=PATIENCE_S)
    async for _ in control.watch_prefixes(POOL, timeout_s=PATIENCE_S):
        pass


async def session_of(control: ControlClient) -> Session:
    layout = (await control.wait_ready(POOL)).layout
    return await control.open_session(POOL, layout)


async def moves(control: ControlClient) -> None:
    """A fork that is written to, which copies a block, and is swapped out and in."""
    session = await session_of(control)
    async with session, session.open_execution() as execution:
        for operations in (
            [ops.admit(1, range(300, 330))],
            [ops.fork(1, 2), ops.append(2, [7], 1, first_positions=30)],
            [ops.swap([2], "host")],
            [ops.swap([2], "device")],
        ):
            result = (await session.step(operations)).raise_for_status()
            await execute(session, execution, result.plan)


async def mistakes(control: ControlClient) -> None:
    """A forged plan, an abort, a resync, a prefix forgotten, and a session that is left alone."""
    session = await session_of(control)
    async with session.open_execution() as execution:
        with pytest.raises(KvplaneError):
            await execution.start(SignedPayload(payload=b"forged"))
        await session.run(ops.admit(1, range(100)))
        await session.abort_plans(session.last_number)
        await execute(session, execution, (await session.abort_plans(whole_tables=True)).plan)
    await control.forget_prefixes(POOL, ForgetScope.NAMESPACE, force=True)
    await session.run(ops.admit(2, range(200, 240)))
    await session.detach()


async def overload(control: ControlClient) -> None:
    """One session holds most blocks and does nothing. Another waits for some until a sequence is
    cut, which is admitted again and finds what is left of it.
    """
    idle, waiting = await session_of(control), await session_of(control)
    block = idle.layout.block_size_tokens
    prompt = [*range((NUM_BLOCKS - 8) * block)]
    async with idle, waiting:
        async with idle.open_execution() as execution:
            await execute(idle, execution, (await idle.run(ops.admit(1, prompt))).plan)
            await idle.submit_receipts()
        await waiting.step([ops.admit(1, [7] * 20 * block, wait=True)])
        deadline_s = time.monotonic() + PATIENCE_S
        while not (await idle.step([])).news.cut:
            assert time.monotonic() < deadline_s, "nothing was cut"
            await asyncio.sleep(0.2)
        await waiting.close()
        while (await idle.step([ops.admit(1, prompt)])).results[0].failures:
            assert time.monotonic() < deadline_s, "there is no room, though all others have gone"
            await asyncio.sleep(0.2)
