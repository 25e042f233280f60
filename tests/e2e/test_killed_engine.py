"""An engine dies mid-step, as by SIGKILL: after its lease nothing of it is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_planes import POOL, ROOT, Pair, save_byte_model

from kvplane import ControlClient
from kvplane.results import PoolInfo

LEASE_S = 2.0
PROMPT = "a prompt of a few blocks, so that there is something to hold; " * 3


def describe(pair: Pair) -> PoolInfo:
    async def ask() -> PoolInfo:
        async with ControlClient(pair.control.address) as client:
            return await client.get_pool(POOL)

    return asyncio.run(ask())


def counters_of(pair: Pair) -> dict[str, int]:
    async def ask() -> dict[str, int]:
        async with ControlClient(pair.control.address) as client:
            return await client.get_counters(POOL)

    return asyncio.run(ask())


def num_in_use(pool: PoolInfo) -> int:
    """Blocks, of both tiers, that somebody holds or that wait for somebody's plans."""
    return sum(tier.num_held_blocks + tier.num_retired_blocks for tier in pool.usage)


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come about in time"
        time.sleep(0.05)


def engine(model: Path, pair: Pair, max_tokens: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "engine", "generate", "--model", str(model)),
            *("--control-plane", pair.control.address, "--pool-id", POOL),
            *("--prompt", PROMPT, "--max-tokens", str(max_tokens), "--ignore-eos"),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("kill_after_s", [0.0, pytest.param(0.13, marks=pytest.mark.nightly)])
def test_an_engine_killed_mid_step_leaves_no_block_held_after_its_lease(
    tmp_path: Path, kill_after_s: float
) -> None:
    model = save_byte_model(tmp_path / "model")
    with Pair(model, tmp_path, lease_s=LEASE_S) as pair:
        wait_until(lambda: is_ready(pair), 60.0)
        victim = engine(model, pair, max_tokens=300)
        try:
            wait_until(lambda: victim.poll() is not None or num_in_use(describe(pair)) > 0, 60.0)
            time.sleep(kill_after_s)
            assert victim.poll() is None, "it must still be at work"
        finally:
            victim.kill()
            victim.wait()
        assert num_in_use(describe(pair)) > 0
        wait_until(lambda: num_in_use(describe(pair)) == 0, LEASE_S + 5.0)
        counters = counters_of(pair)
        assert (counters["sessions"], counters['sequences{state="device"}']) == (0, 0)
        assert engine(model, pair, max_tokens=5).wait(60) == 0


def is_ready(pair: Pair) -> bool:
    try:
        return describe(pair).ready
    except Exception:  # not yet listening, or no shard has come
        return False
