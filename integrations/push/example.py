"""Prefill here, decode there: blocks computed in one pool are moved to another.

The sequence is admitted in the second pool too, and its plan says which slots to write. The first
pool's data plane sends them to the second's, which writes them instead of computing them; its
receipt publishes them as always. With two pools of one layout, whose data planes were started with
``--plug-ins push`` and KVPLANE_PUSH_BIND=127.0.0.1:0 KVPLANE_PUSH_TO=127.0.0.1 set:

    python -m kvplane.integrations.push.example 127.0.0.1:50051 POOL OTHER-POOL
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from kvplane import ControlClient, Execution, Session, Tensor, ops

from .client import PrefixMover


async def prefill(session: Session, execution: Execution, prompt: Sequence[int]) -> None:
    """Compute a prompt with made-up keys and values: bytes below 64 are small numbers."""
    admitted = await session.run(ops.admit(1, prompt))
    await execution.start(admitted.plan)
    for layer in execution.layers:
        shape = execution.key_shape(layer)
        num_bytes = Tensor.size_bytes(session.layout.dtype, shape)
        made_up = bytes((layer + i) % 64 for i in range(num_bytes))
        tensor = Tensor(session.layout.dtype, shape, made_up)
        await execution.layer(layer, tensor, tensor, tensor)
    await session.submit_receipts()


async def main(address: str, pool_id: str, other_pool_id: str) -> None:
    """Prefill a prompt of three blocks in one pool and find it cached in the other."""
    async with (
        ControlClient(address) as control,
        control.open_session(pool_id) as here,
        control.open_session(other_pool_id) as there,
        here.open_execution() as source,
        there.open_execution() as target,
    ):
        prompt = range(3 * here.layout.block_size_tokens)
        await prefill(here, source, prompt)
        async with PrefixMover(here, there) as mover:
            moved = await mover.move(1, prompt, max_total_tokens=len(prompt) + 8)

        read = await source.read_blocks(1, range(3))
        back = await target.read_blocks(1, range(3))
        (cached,) = await control.find_prefix(prompt, pool_ids=[other_pool_id])
        print(f"moved {moved.num_bytes} bytes, the same there: {back[0].blocks == read[0].blocks}")
        print(f"cached in {other_pool_id}: {cached.num_cached_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
