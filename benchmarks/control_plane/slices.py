"""Cases of long requests: how long the longest of their slices delays others.

Seconds are processor time of the thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.control_plane import messages
from benchmarks.control_plane.engine import World
from benchmarks.control_plane.in_process import TENANT, CorePool
from benchmarks.control_plane.messages import prompt
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes
from control_plane.steps.answers import StepAnswer
from control_plane.steps.requests import Request
from kvplane import ops
from kvplane.slices import Slices
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
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


async def _of_forks(world: World, sizes: Sizes, name: str) -> float:
    async with world.pool(sizes.num_forks // 8 + 1_000) as pool:
        assert isinstance(pool, CorePool), "measured in process only"
        engine = await pool.engine()
        (parent,) = engine.new_ids(1)
        await engine.step(ops.admit(parent, prompt(parent, _PROMPT_TOKENS)))
        ids = engine.new_ids(sizes.num_forks)
        for i in range(0, len(ids), _FORKS_A_STEP):
            await engine.step(ops.fork(parent, ids[i : i + _FORKS_A_STEP]))
        append = ops.append(parent, [1], 1, first_positions=_PROMPT_TOKENS)
        await engine.step(append, is_receipted=False)
        ref, number = _numbered(pool)
        if name == "close":
            return _closed(pool, ref)
        if name == "resync":
            return _longest(
                pool, cpb.AbortPlansRequest(whole_tables=True, session=ref, number=number)
            )[1]
        abort = cpb.AbortPlansRequest(session=ref, number=number, plan_number=number - 1)
        return _longest(pool, abort)[1]


async def _of_prompts(world: World, sizes: Sizes, num: int) -> tuple[float, float, float, float]:
    """Compute, publish, send and free ``num`` prompts; one message holds 64 of 32,768 tokens or
    more.
    """
    async with world.pool(num * (sizes.prompt_blocks + 1) * 17 // 16) as pool:
        assert isinstance(pool, CorePool), "measured in process only"
        engine = await pool.engine()
        ids = engine.new_ids(num)
        prompts = [prompt(i, sizes.prompt_tokens) for i in ids]
        admits = [ops.admit(i, tokens) for i, tokens in zip(ids, prompts, strict=True)]
        await engine.step(*admits, is_receipted=False)
        await engine.abort()
        ref, number = _numbered(pool)
        length = sizes.prompt_tokens
        again = ops.append(ids, b"".join(prompts), length, first_positions=0, num_tokens=length)
        request = cpb.StepRequest(session=ref, number=number, operations=[again])
        answer, compute_s = _longest(pool, request)
        receipt = messages.receipt(pool.key, ref, number, answer.plan)
        request = cpb.StepRequest(session=ref, number=number + 1, receipts=[receipt])
        _, publish_s = _longest(pool, request)
        append = ops.append(ids, [1] * num, 1, first_positions=length, num_tokens=1)
        request = cpb.StepRequest(session=ref, number=number + 2, operations=[append])
        pool.core.step(request, TENANT)
        _, tables_s = _longest(
            pool, cpb.AbortPlansRequest(whole_tables=True, session=ref, number=number + 3)
        )
        request = cpb.StepRequest(session=ref, number=number + 4, operations=[ops.free(ids)])
        _, free_s = _longest(pool, request)
        return compute_s, publish_s, tables_s, free_s


async def _of_swaps(world: World, sizes: Sizes) -> dict[str, float]:
    num = sizes.num_swapped_sequences
    num_blocks = num * (sizes.prompt_blocks + 1) * 17 // 16
    async with world.pool(num_blocks, num_host_blocks=num_blocks) as pool:
        assert isinstance(pool, CorePool), "measured in process only"
        engine = await pool.engine()
        ids = engine.new_ids(num)
        for i in ids:
            await engine.step(ops.admit(i, prompt(i, sizes.prompt_tokens)))
        ref, number = _numbered(pool)
        out = ops.swap(ids, "host")
        longest_s = {}
        request = cpb.StepRequest(session=ref, number=number, operations=[out])
        _, longest_s["out"] = _longest(pool, request)
        abort = cpb.AbortPlansRequest(session=ref, number=number + 1, plan_number=number)
        _, longest_s["abort"] = _longest(pool, abort)
        request = cpb.StepRequest(session=ref, number=number + 2, operations=[out])
        answer, longest_s["out_after_abort"] = _longest(pool, request)
        receipt = messages.receipt(pool.key, ref, number + 2, answer.plan)
        request = cpb.StepRequest(session=ref, number=number + 3, receipts=[receipt])
        _, longest_s["receipt"] = _longest(pool, request)
        back = [ops.swap(ids, "device")]
        request = cpb.StepRequest(session=ref, number=number + 4, operations=back)
        _, longest_s["in"] = _longest(pool, request)
        abort = cpb.AbortPlansRequest(session=ref, number=number + 5, plan_number=number + 4)
        pool.core.abort_plans(abort, TENANT)
        one_by_one = [ops.swap([i], "device") for i in ids]
        request = cpb.StepRequest(session=ref, number=number + 6, operations=one_by_one)
        _, longest_s["in_one_by_one"] = _longest(pool, request)
        longest_s["close"] = _closed(pool, ref)
        return longest_s


async def _of_search(world: World, sizes: Sizes, num_blocks: int) -> float:
    async with world.pool(num_blocks + 1_000) as pool:
        assert isinstance(pool, CorePool), "measured in process only"
        engine = await pool.engine()
        (sequence_id,) = engine.new_ids(1)
        num_parts = num_blocks // sizes.prompt_blocks
        tokens = b"".join(prompt(i, sizes.prompt_tokens) for i in range(num_parts))
        await engine.step(ops.admit(sequence_id, tokens))
        await engine.settle()
        request = FindPrefixRequest(token_ids=tokens, with_blocks=True)
        answer, longest_s = _longest_of(pool.core.find_prefix(request, TENANT))
        assert len(answer.matches[0].blocks.tiers) == num_blocks
        return longest_s


def _numbered(pool: CorePool) -> tuple[tpb.SessionRef, int]:
    """Return the only session of the pool, and its next number."""
    (session,) = pool.core.sessions.by_id.values()
    return session.ref, session.numbers.last + 1


def _longest(pool: CorePool, request: Request) -> tuple[Any, float]:
    """Return a request's answer, and the seconds of the longest slice."""
    return _longest_of(pool.core.run(request, TENANT))


def _longest_of(left: Slices[Any]) -> tuple[Any, float]:
    """Return what the slices return, and the seconds of the longest."""
    longest_s = 0.0
    while True:
        began_s = time.thread_time()
        try:
            next(left)
        except StopIteration as end:
            longest_s = max(longest_s, time.thread_time() - began_s)
            answer = end.value
            if isinstance(answer, StepAnswer):
                began_s = time.thread_time()
                answer.settle()  # by itself, once the answer is sent
                longest_s = max(longest_s, time.thread_time() - began_s)
                answer = cpb.StepResponse.FromString(answer.step)
            return answer, longest_s
        longest_s = max(longest_s, time.thread_time() - began_s)


def _closed(pool: CorePool, ref: tpb.SessionRef) -> float:
    began_s = time.thread_time()
    pool.core.close_session(ref, TENANT)
    pool.core.take_notified()
    longest_s = time.thread_time() - began_s
    while pool.core.has_work():
        began_s = time.thread_time()
        pool.core.work()
        pool.core.take_notified()
        longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s
