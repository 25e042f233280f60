"""Cases that admit, free, swap and abort prompts of 32,768 tokens, and decode steps."""

from __future__ import annotations

from benchmarks.control_plane.engine import Engine, World
from benchmarks.control_plane.messages import Decoding, prompt
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops

_NUM_HELD_PROMPTS = 4
_NUM_DECODING = 256
_NUM_PLANS_IN_FLIGHT = 4  # as many as a control plane allows a session


async def hit_in_use_32k(world: World, sizes: Sizes) -> list[Row]:
    """Admit prompts that other sequences hold; several by turns."""
    async with world.pool(sizes.num_pool_blocks) as pool:
        engine = await pool.engine()
        holders = engine.new_ids(_NUM_HELD_PROMPTS)
        for seed in holders:
            await engine.step(ops.admit(seed, prompt(seed, sizes.prompt_tokens)))
            await engine.settle()
        return [await _hits("hit_in_use_32k", engine, holders, sizes)]


async def hit_free_32k_pool100k(world: World, sizes: Sizes) -> list[Row]:
    """Admit prompts that nobody holds, of a pool that is full of such prompts."""
    async with world.pool(sizes.num_pool_blocks) as pool:
        engine = await pool.engine()
        seeds = await _fill(engine, sizes)
        return [await _hits("hit_free_32k_pool100k", engine, seeds, sizes)]


async def miss_32k(world: World, sizes: Sizes) -> list[Row]:
    """Admit a new prompt to a pool that is full of others; each step carries the receipt of the
    step before, and so publishes that step's prompt.
    """
    async with world.pool(sizes.num_pool_blocks) as pool:
        engine = await pool.engine()
        await _fill(engine, sizes)
        most_held = sizes.num_pool_blocks // sizes.prompt_blocks // 2
        held: list[int] = []
        admit_s, free_s = [], []
        for sequence_id in engine.new_ids(sizes.num_prompts):
            tokens = prompt(sequence_id, sizes.prompt_tokens)
            seconds = await engine.step(ops.admit(sequence_id, tokens))
            if held:  # the first one carries no receipt of an admission
                admit_s.append(seconds)
            held.append(sequence_id)
            if len(held) == most_held:
                await engine.settle()
                free_s += [await engine.step(ops.free([i])) for i in held]
                held.clear()
        rows = [Row.of_seconds("miss_32k", admit_s)]
        return [*rows, Row.of_seconds("free_32k", free_s)] if free_s else rows


async def empty_step(world: World, sizes: Sizes) -> list[Row]:
    """Take a step that changes nothing: the cost of carrying it."""
    async with world.pool(sizes.num_pool_blocks) as pool:
        engine = await pool.engine()
        seconds = [await engine.step() for _ in range(sizes.num_decode_steps)]
        return [Row.of_seconds("empty_step", seconds)]


async def decode_step_256(world: World, sizes: Sizes) -> list[Row]:
    """Append one token to each of 256 sequences, with the receipt of the step before."""
    async with world.pool(sizes.num_pool_blocks) as pool:
        engine = await pool.engine()
        decoding = Decoding(engine.new_ids(_NUM_DECODING))
        await engine.step(*decoding.admits())
        seconds = [await engine.step(decoding.append()) for _ in range(sizes.num_decode_steps)]
        return [Row.of_seconds("decode_step_256", seconds)]


async def swap_2048_blocks(world: World, sizes: Sizes) -> list[Row]:
    """Swap a sequence out and in again; each step carries the receipt of the one before."""
    async with world.pool(sizes.num_pool_blocks, 4 * sizes.prompt_blocks) as pool:
        engine = await pool.engine()
        out_s, in_s = [], []
        for sequence_id in engine.new_ids(sizes.num_swaps):
            await engine.step(ops.admit(sequence_id, prompt(sequence_id, sizes.prompt_tokens)))
            await engine.settle()
            out_s.append(await engine.step(ops.swap([sequence_id], "host")))
            in_s.append(await engine.step(ops.swap([sequence_id], "device")))
            await engine.step(ops.free([sequence_id]))
    return [
        Row.of_seconds("swap_2048_blocks/out", out_s),
        Row.of_seconds("swap_2048_blocks/in", in_s),
    ]


async def abort_256x2048(world: World, sizes: Sizes) -> list[Row]:
    """Abort a decode step of 256 sequences of 2,048 blocks each; the next step's plan has all
    tables whole. Before that the admissions are aborted once, and all prompts computed again.
    """
    name, num = "abort_256x2048", sizes.num_aborted_sequences
    num_blocks = num * (sizes.prompt_blocks + 1)
    async with world.pool(num_blocks + num_blocks // 16) as pool:
        engine = await pool.engine()
        ids = engine.new_ids(num)
        prompts = [prompt(i, sizes.prompt_tokens) for i in ids]
        admits = [ops.admit(i, tokens) for i, tokens in zip(ids, prompts, strict=True)]
        share = num // _NUM_PLANS_IN_FLIGHT
        for i in range(0, num, share):
            await engine.step(*admits[i : i + share], is_receipted=False)
        await engine.abort()
        length = sizes.prompt_tokens
        again = ops.append(ids, b"".join(prompts), length, first_positions=0, num_tokens=length)
        await engine.step(again)
        position = length
        abort_s, next_s = [], []
        for _ in range(sizes.num_aborts):
            append = ops.append(ids, ids, 1, first_positions=position, num_tokens=1)
            await engine.step(append, is_receipted=False)
            abort_s.append(await engine.abort())
            next_s.append(await engine.step(append))
            position += 1
    return [
        Row.of_seconds(f"{name}/abort", abort_s),
        Row.of_seconds(f"{name}/next_step", next_s),
    ]


async def _hits(name: str, engine: Engine, seeds: list[int], sizes: Sizes) -> Row:
    """Admit the prompts of ``seeds`` by turns, and free them."""
    seconds = []
    for i, sequence_id in enumerate(engine.new_ids(sizes.num_prompts)):
        tokens = prompt(seeds[i % len(seeds)], sizes.prompt_tokens)
        seconds.append(await engine.step(ops.admit(sequence_id, tokens)))
        await engine.settle()
        await engine.step(ops.free([sequence_id]))
        await engine.settle()
    return Row.of_seconds(name, seconds)


async def _fill(engine: Engine, sizes: Sizes) -> list[int]:
    """Publish prompts until a pool holds no other; return their seeds."""
    num_usable = sizes.num_pool_blocks * 98 // 100  # admissions leave some blocks free
    seeds = engine.new_ids(num_usable // sizes.prompt_blocks)
    for seed in seeds:
        await engine.step(ops.admit(seed, prompt(seed, sizes.prompt_tokens)))
        await engine.settle()
        await engine.step(ops.free([seed]))
    await engine.settle()
    return seeds
