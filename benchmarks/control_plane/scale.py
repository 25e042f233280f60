"""Measures the cost of a block in pools of 1,000 to 1,000,000 blocks, in time and in memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.common.timing import quantile
from benchmarks.control_plane.engine import Engine, World
from benchmarks.control_plane.in_process import CorePool, InProcess
from benchmarks.control_plane.messages import BLOCK_SIZE_TOKENS, Decoding, prompt
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops

_PROMPT_BLOCKS: Final = 256
_PROMPT_TOKENS: Final = _PROMPT_BLOCKS * BLOCK_SIZE_TOKENS
_NUM_DECODING: Final = 64
_DECODE_STEPS_PER_ROUND: Final = 64
_NS_PER_BLOCK: Final = "ns/block"
_TOUCHED: Final = "looks/block"


async def scale(world: World, sizes: Sizes) -> list[Row]:
    """Measure admissions of 256 blocks and decode steps of 64 sequences in pools full of cached
    prompts, and the ratio of the largest pool's cost to the smallest's. Beside the time, count how
    often they look at a block or at an entry of the index.
    """
    rows: list[Row] = []
    for num_blocks in sizes.scale_pools:
        async with world.pool(num_blocks) as pool:
            assert isinstance(pool, CorePool), "measured in process only"
            rows += await _costs(pool, num_blocks, sizes)
    num_pools = len(sizes.scale_pools)
    kinds = len(rows) // num_pools
    for first, last in zip(rows[:kinds], rows[-kinds:], strict=True):
        name = first.name.rpartition("/")[0]
        growth = (_times(first.p50, last.p50), _times(first.p99, last.p99))
        rows.append(Row(f"{name}/growth", "x", *growth, last.num_samples))
    return rows


def _times(first: float, last: float) -> float:
    """Return how many times as much ``last`` is; for a ``first`` of 0 return 1 + ``last``."""
    return last / first if first else 1.0 + last


async def _costs(pool: CorePool, num_blocks: int, sizes: Sizes) -> list[Row]:
    engine = await pool.engine()
    cached = engine.new_ids(num_blocks * 9 // 10 // _PROMPT_BLOCKS)
    for seed in cached:
        await _admit(engine, seed)
    choose = random.Random(0)
    hits = [choose.choice(cached) for _ in range(sizes.num_scale_prompts)]
    misses = engine.new_ids(sizes.num_scale_prompts)
    hit_s, hit_touched = await _counted(pool, [partial(_admit, engine, seed) for seed in hits])
    miss_s, miss_touched = await _counted(pool, [partial(_admit, engine, seed) for seed in misses])
    decode_s, decode_touched = list[float](), list[int]()
    while len(decode_s) < 4 * sizes.num_scale_prompts:
        ids = engine.new_ids(_NUM_DECODING)
        decoding = Decoding(ids)
        await engine.step(*decoding.admits())
        steps = [partial(_decode, engine, decoding)] * _DECODE_STEPS_PER_ROUND
        for so_far, new in zip(
            (decode_s, decode_touched), await _counted(pool, steps), strict=True
        ):
            so_far += new
        await engine.step(ops.free(ids))
        await engine.settle()
    return [
        _per_block(f"scale_admit_hit/{num_blocks}", hit_s, _PROMPT_BLOCKS),
        _per_block(f"scale_admit_miss/{num_blocks}", miss_s, _PROMPT_BLOCKS),
        _per_block(f"scale_decode/{num_blocks}", decode_s, _NUM_DECODING),
        _touched(f"scale_admit_hit_touched/{num_blocks}", hit_touched, _PROMPT_BLOCKS),
        _touched(f"scale_admit_miss_touched/{num_blocks}", miss_touched, _PROMPT_BLOCKS),
        _touched(f"scale_decode_touched/{num_blocks}", decode_touched, _NUM_DECODING),
    ]


async def _counted(
    pool: CorePool, operations: Sequence[Callable[[], Awaitable[float]]]
) -> tuple[list[float], list[int]]:
    """Return the operations' results, and how often each looks at a block or an entry."""
    seconds, touched = [], []
    for operation in operations:
        before = pool.num_touched()
        seconds.append(await operation())
        touched.append(pool.num_touched() - before)
    return seconds, touched


async def _decode(engine: Engine, decoding: Decoding) -> float:
    return await engine.step(decoding.append())


async def _admit(engine: Engine, seed: int) -> float:
    """Admit a prompt, take its receipt and free it; return the seconds of the first two."""
    (sequence_id,) = engine.new_ids(1)
    seconds = await engine.step(ops.admit(sequence_id, prompt(seed, _PROMPT_TOKENS)))
    seconds += await engine.settle()
    await engine.step(ops.free([sequence_id]))
    await engine.settle()
    return seconds


def _per_block(name: str, seconds: Sequence[float], num_blocks: int) -> Row:
    p50, p99 = (1e9 * quantile(seconds, q) / num_blocks for q in (0.5, 0.99))
    return Row(name, _NS_PER_BLOCK, p50, p99, len(seconds))


def _touched(name: str, touched: Sequence[int], num_blocks: int) -> Row:
    p50, p99 = (quantile(touched, q) / num_blocks for q in (0.5, 0.99))
    return Row(name, _TOUCHED, p50, p99, len(touched))


async def memory(world: World, sizes: Sizes) -> list[Row]:
    """Measure the bytes of a block, and the additional ones of its publication and tokens."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        loop = asyncio.get_running_loop()
        per_block, per_entry = await loop.run_in_executor(process, _measure_memory, sizes)
    return [
        Row.of_one("memory_per_block", "bytes", per_block),
        Row.of_one("memory_per_entry", "bytes", per_entry),
    ]


def _measure_memory(sizes: Sizes) -> tuple[float, float]:
    """Measure bytes per block and per published block, in this process, which does nothing else."""
    return asyncio.run(_fill_and_measure(sizes))


async def _fill_and_measure(sizes: Sizes) -> tuple[float, float]:
    async with InProcess().pool(1_000) as small:
        await _admit(await small.engine(), 1)  # memory of a first use, once
    num_entries = sizes.num_rebuilt_prompts * sizes.prompt_blocks
    num_blocks = num_entries + num_entries // 32
    before = _resident_bytes()
    async with InProcess().pool(num_blocks) as pool:
        engine = await pool.engine()
        empty = _resident_bytes()
        for sequence_id in engine.new_ids(sizes.num_rebuilt_prompts):
            await engine.step(ops.admit(sequence_id, prompt(sequence_id, sizes.prompt_tokens)))
            await engine.settle()
            await engine.step(ops.free([sequence_id]))
        await engine.settle()
        full = _resident_bytes()
        num_cached = pool.description().usage[0].num_cached_blocks
    if num_cached != num_entries:
        raise RuntimeError(f"{num_cached} blocks are cached instead of {num_entries}")
    return (empty - before) / num_blocks, (full - empty) / num_entries


async def memory_per_session(world: World, sizes: Sizes) -> list[Row]:
    """Measure the memory of a session that has admitted a cached prompt which others have too."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        loop = asyncio.get_running_loop()
        per_session = await loop.run_in_executor(process, _measure_sessions, sizes)
    return [Row.of_one("memory_per_session", "bytes", per_session)]


def _measure_sessions(sizes: Sizes) -> float:
    return asyncio.run(_admit_and_measure(sizes))


async def _admit_and_measure(sizes: Sizes) -> float:
    num = sizes.num_prefix_sessions
    async with InProcess().pool(2 * (sizes.prompt_blocks + num)) as pool:
        tokens = prompt(1, sizes.prompt_tokens)
        engines = [await pool.engine() for _ in range(num + 1)]
        for engine in engines[:1]:
            await engine.step(ops.admit(1, tokens))
            await engine.settle()
        before = _resident_bytes()
        for engine in engines[1:]:
            (sequence_id,) = engine.new_ids(1)
            await engine.step(ops.admit(sequence_id, tokens))
            await engine.settle()
        return (_resident_bytes() - before) / num


def _resident_bytes() -> int:
    """Return this process's memory, without the part that it could return to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
