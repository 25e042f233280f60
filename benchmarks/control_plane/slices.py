"""Cases of long requests: how long the longest of their slices delays others.

Seconds are processor time of the thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.control_plane.engine import Engine, World
from benchmarks.control_plane.in_process import TENANT, CorePool
from benchmarks.control_plane.messages import prompt
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops
from kvplane.slices import Slices
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1.prefix_pb2 import FindPrefixRequest

_PROMPT_TOKENS = 485
_FORKS_A_STEP = 4_000


async def slices(world: World, sizes: Sizes) -> list[Row]:
    """Measure the longest slice of each of these: abort the plans of a session of many forks, with
    whole tables and without, and end it; compute long prompts again after an abort, publish them,
    send their tables whole, and free them; swap many prompts out, and abort that, plan it again,
    receipt it, swap them in and end the session; describe the blocks of a long prefix. The
    request's and the answer's bytes do not count.
    """
    rows = []
    for name in ("resync", "abort", "close"):
        longest_s = [await _of_forks(world, sizes, name) for _ in range(sizes.num_aborts)]
        rows.append(Row.of_seconds(f"slices/{name}_{sizes.num_forks}_forks", longest_s))
    for num in (sizes.num_aborted_sequences // 4, sizes.num_aborted_sequences):
        measured = [await _of_prompts(world, sizes, num) for _ in range(sizes.num_aborts)]
        about = f"{num}x{sizes.prompt_blocks}"
        for name, *each_s in zip(
            (
                f"compute_{about}_again",
                f"publish_{about}",
                f"whole_tables_{about}",
                f"free_{about}",
            ),
            *measured,
            strict=True,
        ):
            rows.append(Row.of_seconds(f"slices/{name}", each_s))
    swapped = [await _of_swaps(world, sizes) for _ in range(sizes.num_aborts)]
    about = f"{sizes.num_swapped_sequences}x{sizes.prompt_blocks}"
    for name in swapped[0]:
        each_s = [measured_s[name] for measured_s in swapped]
        rows.append(Row.of_seconds(f"slices/swap_{about}/{name}", each_s))
    num_blocks = sizes.num_aborted_sequences // 4 * sizes.prompt_blocks
    found = [await _of_search(world, sizes, num_blocks) for _ in range(sizes.num_aborts)]
    rows.append(Row.of_seconds(f"slices/find_{num_blocks}_blocks", found))
    return rows


class LongestSlice:
    """A wire to a pool's core whose seconds are those of a request's longest slice."""

    def __init__(self, pool: CorePool) -> None:
        self._core = pool.core

    async def step(self, request: cpb.StepRequest) -> tuple[cpb.StepResponse, float]:
        answer, longest_s = _longest_of(self._core.run(request, TENANT))
        began_s = time.thread_time()
        answer.settle()  # by itself, once the answer is sent
        longest_s = max(longest_s, time.thread_time() - began_s)
        return cpb.StepResponse.FromString(answer.step), longest_s

    async def abort(self, request: cpb.AbortPlansRequest) -> float:
        return _longest_of(self._core.run(request, TENANT))[1]


@asynccontextmanager
async def _timed(
    world: World, num_device_blocks: int, num_host_blocks: int = 0
) -> AsyncIterator[tuple[CorePool, Engine]]:
    """Yield a pool, and its only engine, which measures slices."""
    async with world.pool(num_device_blocks, num_host_blocks) as pool:
        assert isinstance(pool, CorePool), "measured in process only"
        yield pool, await pool.engine(LongestSlice(pool))


async def _of_forks(world: World, sizes: Sizes, name: str) -> float:
    async with _timed(world, sizes.num_forks // 8 + 1_000) as (pool, engine):
        (parent,) = engine.new_ids(1)
        await engine.step(ops.admit(parent, prompt(parent, _PROMPT_TOKENS)))
        ids = engine.new_ids(sizes.num_forks)
        for i in range(0, len(ids), _FORKS_A_STEP):
            await engine.step(ops.fork(parent, ids[i : i + _FORKS_A_STEP]))
        append = ops.append(parent, [1], 1, first_positions=_PROMPT_TOKENS)
        await engine.step(append, is_receipted=False)
        if name == "close":
            return _closed(pool, engine)
        return await (engine.resync() if name == "resync" else engine.abort())


async def _of_prompts(world: World, sizes: Sizes, num: int) -> tuple[float, float, float, float]:
    """Compute, publish, send and free ``num`` prompts; one message holds 64 of 32,768 tokens or
    more.
    """
    async with _timed(world, num * (sizes.prompt_blocks + 1) * 17 // 16) as (_, engine):
        ids = engine.new_ids(num)
        prompts = [prompt(i, sizes.prompt_tokens) for i in ids]
        admits = [ops.admit(i, tokens) for i, tokens in zip(ids, prompts, strict=True)]
        await engine.step(*admits, is_receipted=False)
        await engine.abort()
        length = sizes.prompt_tokens
        again = ops.append(ids, b"".join(prompts), length, first_positions=0, num_tokens=length)
        compute_s = await engine.step(again)
        publish_s = await engine.settle()
        append = ops.append(ids, [1] * num, 1, first_positions=length, num_tokens=1)
        await engine.step(append, is_receipted=False)
        tables_s = await engine.resync()
        free_s = await engine.step(ops.free(ids))
        return compute_s, publish_s, tables_s, free_s


async def _of_swaps(world: World, sizes: Sizes) -> dict[str, float]:
    num = sizes.num_swapped_sequences
    num_blocks = num * (sizes.prompt_blocks + 1) * 17 // 16
    async with _timed(world, num_blocks, num_blocks) as (pool, engine):
        ids = engine.new_ids(num)
        for i in ids:
            await engine.step(ops.admit(i, prompt(i, sizes.prompt_tokens)))
        await engine.settle()
        out, longest_s = ops.swap(ids, "host"), {}
        longest_s["out"] = await engine.step(out, is_receipted=False)
        longest_s["abort"] = await engine.abort()
        longest_s["out_after_abort"] = await engine.step(out)
        longest_s["receipt"] = await engine.settle()
        longest_s["in"] = await engine.step(ops.swap(ids, "device"), is_receipted=False)
        await engine.abort()
        one_by_one = [ops.swap([i], "device") for i in ids]
        longest_s["in_one_by_one"] = await engine.step(*one_by_one, is_receipted=False)
        longest_s["close"] = _closed(pool, engine)
        return longest_s


async def _of_search(world: World, sizes: Sizes, num_blocks: int) -> float:
    async with _timed(world, num_blocks + 1_000) as (pool, engine):
        (sequence_id,) = engine.new_ids(1)
        num_parts = num_blocks // sizes.prompt_blocks
        tokens = b"".join(prompt(i, sizes.prompt_tokens) for i in range(num_parts))
        await engine.step(ops.admit(sequence_id, tokens))
        await engine.settle()
        request = FindPrefixRequest(token_ids=tokens, with_blocks=True)
        answer, longest_s = _longest_of(pool.core.find_prefix(request, TENANT))
        assert len(answer.matches[0].blocks.tiers) == num_blocks
        return longest_s


def _longest_of(left: Slices[Any]) -> tuple[Any, float]:
    """Return what the slices return, and the seconds of the longest."""
    longest_s = 0.0
    while True:
        began_s = time.thread_time()
        try:
            next(left)
        except StopIteration as end:
            return end.value, max(longest_s, time.thread_time() - began_s)
        longest_s = max(longest_s, time.thread_time() - began_s)


def _closed(pool: CorePool, engine: Engine) -> float:
    began_s = time.thread_time()
    pool.core.close_session(engine.session, TENANT)
    pool.core.take_notified()
    longest_s = time.thread_time() - began_s
    while (slice_s := pool.work()) is not None:
        longest_s = max(longest_s, slice_s)
    return longest_s
