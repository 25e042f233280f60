"""Measures the memory of a block, of its publication, and of a session."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.common.timing import drop_leftovers
from benchmarks.control_plane.engine import Engine, World
from benchmarks.control_plane.in_process import InProcess
from benchmarks.control_plane.messages import prompt
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops

Measure = Callable[[Sizes], Coroutine[Any, Any, tuple[float, ...]]]


async def memory(world: World, sizes: Sizes) -> list[Row]:
    """Measure the bytes of a block, the additional ones of its publication and tokens, and those of
    a session that has admitted a cached prompt which others have too.
    """
    per_block, per_entry = _in_fresh_process(_fill, sizes)
    (per_session,) = _in_fresh_process(_share, sizes)
    return [
        Row.of_one("memory_per_block", "bytes", per_block),
        Row.of_one("memory_per_entry", "bytes", per_entry),
        Row.of_one("memory_per_session", "bytes", per_session),
    ]


def _in_fresh_process(measure: Measure, sizes: Sizes) -> tuple[float, ...]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (measure, sizes))


def _run(measure: Measure, sizes: Sizes) -> tuple[float, ...]:
    return asyncio.run(measure(sizes))


async def _fill(sizes: Sizes) -> tuple[float, ...]:
    """Return the bytes of a block and of a published one, in this process, which has no others."""
    async with InProcess().pool(1_000) as small:
        await _compute(await small.engine(), 4_096)  # memory of a first use, once
    num_entries = sizes.num_rebuilt_prompts * sizes.prompt_blocks
    num_blocks = num_entries + num_entries // 32
    before = _resident_bytes()
    async with InProcess().pool(num_blocks) as pool:
        engine = await pool.engine()
        empty = _resident_bytes()
        for _ in range(sizes.num_rebuilt_prompts):
            await _compute(engine, sizes.prompt_tokens)
        full = _resident_bytes()
        num_cached = pool.description().usage[0].num_cached_blocks
    if num_cached != num_entries:
        raise RuntimeError(f"{num_cached} blocks are cached instead of {num_entries}")
    return (empty - before) / num_blocks, (full - empty) / num_entries


async def _compute(engine: Engine, num_tokens: int) -> None:
    """Admit a prompt, take its receipt and free it."""
    (sequence_id,) = engine.new_ids(1)
    await engine.step(ops.admit(sequence_id, prompt(sequence_id, num_tokens)))
    await engine.settle()
    await engine.step(ops.free([sequence_id]))
    await engine.settle()


async def _share(sizes: Sizes) -> tuple[float, ...]:
    num = sizes.num_prefix_sessions
    async with InProcess().pool(2 * (sizes.prompt_blocks + num)) as pool:
        tokens = prompt(1, sizes.prompt_tokens)
        engines = [await pool.engine() for _ in range(num + 1)]
        before = 0
        for i, engine in enumerate(engines):
            if i == 1:
                before = _resident_bytes()
            (sequence_id,) = engine.new_ids(1)
            await engine.step(ops.admit(sequence_id, tokens))
            await engine.settle()
        return ((_resident_bytes() - before) / num,)


def _resident_bytes() -> int:
    """Return this process's memory, without the part that it could return to the system."""
    drop_leftovers()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
