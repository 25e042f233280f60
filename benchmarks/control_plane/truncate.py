"""The case that drops rejected speculative tokens."""

from __future__ import annotations

from benchmarks.control_plane.engine import World
from benchmarks.control_plane.messages import BLOCK_SIZE_TOKENS, prompt
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops

_NUM_SEQUENCES = 256
_NUM_COMPUTED_TOKENS = 5
_NUM_ACCEPTED_TOKENS = 2


async def truncate(world: World, sizes: Sizes) -> list[Row]:
    """Shorten each of 256 sequences by 3 of 5 tokens that the step before computed; the step
    carries that step's receipt.
    """
    async with world.pool(sizes.num_pool_blocks) as pool:
        engine = await pool.engine()
        ids = engine.new_ids(_NUM_SEQUENCES)
        lengths = [BLOCK_SIZE_TOKENS + i % BLOCK_SIZE_TOKENS for i in range(len(ids))]
        pairs = zip(ids, lengths, strict=True)
        await engine.step(*[ops.admit(i, prompt(i, length)) for i, length in pairs])
        num = _NUM_COMPUTED_TOKENS
        seconds = []
        for step in range(sizes.num_decode_steps // 2):
            tokens = range(step, step + num * len(ids))
            append = ops.append(ids, tokens, num, first_positions=lengths, num_tokens=num)
            await engine.step(append)
            lengths = [length + _NUM_ACCEPTED_TOKENS for length in lengths]
            seconds.append(await engine.step(ops.truncate(ids, lengths)))
        return [Row.of_seconds("truncate", seconds)]
