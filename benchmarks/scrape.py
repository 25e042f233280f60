"""Measures what a scrape costs the control plane's steps, with all blocks of a pool in use.

    python -m benchmarks.scrape [--num-blocks 100000] [--interval-s 15]

A scrape runs on a thread of its own: it holds the event loop while the core is read, and the
interpreter's lock, in turns, while the text is made. Steps are slowed by at most the time of both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

from prometheus_client import generate_latest

from benchmarks.common.cpu import cpu_name
from benchmarks.control_plane.in_process import InProcess
from benchmarks.control_plane.messages import POOL, Decoding, prompt
from control_plane.server.metrics import ControlPlaneMetrics
from kvplane import ops

PROMPT_BLOCKS = 64
PROMPT_TOKENS = 16 * PROMPT_BLOCKS
NUM_DECODING = 256
NUM_REPEATS = 200


async def measure(num_blocks: int) -> tuple[float, float, float, int]:
    """Return medians in seconds: step, reading the core, whole scrape; and the text's bytes."""
    async with InProcess().pool(num_blocks) as pool:
        engine = await pool.engine()
        for seed in engine.new_ids(num_blocks // PROMPT_BLOCKS):
            await engine.step(ops.admit(seed, prompt(seed, PROMPT_TOKENS)))
            await engine.settle()
            await engine.step(ops.free([seed]))
        await engine.settle()
        decoding = Decoding(engine.new_ids(NUM_DECODING))
        await engine.step(*decoding.admits())
        metrics = ControlPlaneMetrics(1)
        metrics.read_pools(lambda: ([pool.core.observe_pool(POOL)], {}))
        step_s, read_s, scrape_s = [], [], []
        for _ in range(NUM_REPEATS):
            step_s.append(await engine.step(decoding.append()))
            read_s.append(timed(lambda: pool.core.observe_pool(POOL)))
            scrape_s.append(timed(lambda: generate_latest(metrics.registry)))
        text = generate_latest(metrics.registry)
        medians = (statistics.median(seconds) for seconds in (step_s, read_s, scrape_s))
        return (*medians, len(text))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-blocks", type=int, default=100_000)
    parser.add_argument("--interval-s", type=float, default=15.0)
    options = parser.parse_args()
    step, read, scrape, size = asyncio.run(measure(options.num_blocks))
    print(f"{cpu_name()}, {options.num_blocks} blocks, {NUM_DECODING} sequences decoding")
    print(f"step                              {step * 1e6:8.0f} us")
    print(f"reading the core for a scrape     {read * 1e6:8.0f} us, the loop is held")
    print(f"the whole scrape, {size:6} bytes    {scrape * 1e6:8.0f} us")
    print(
        f"of all time, scraped every {options.interval_s:g} s  {scrape / options.interval_s:8.4%}"
    )
