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

from kvplane import ControlClient, DataClient, Execution, Layout, Session, Tensor, ops

from .client import PrefixMover


async def prefill(session: Session, execution: Execution, prompt: Sequence[int]) -> None:
    """Compute a prompt with made-up keys and values: bytes below 64 are small numbers."""
    admitted = await session.run(ops.admit(1, prompt))
    num_tokens = (await execution.start(admitted.plan)).num_tokens
    group = session.layout.groups[0]
    shape = (num_tokens, group.num_kv_heads, group.head_size)
    num_bytes = Tensor.size_bytes(session.layout.dtype, shape)
    for layer in execution.layers:
        made_up = bytes((layer + i) % 64 for i in range(num_bytes))
        tensor = Tensor(session.layout.dtype, shape, made_up)
        await execution.layer(layer, tensor, tensor, tensor)
    session.add_receipt(execution.receipt)
    await session.submit_receipts()


async def main(address: str, pool_id: str, other_pool_id: str) -> None:
    """Prefill a prompt of three blocks in one pool and find it cached in the other."""
    async with ControlClient(address) as control:
        layout = Layout.from_proto((await control.wait_ready(pool_id)).layout)
        await control.wait_ready(other_pool_id)
        prompt = range(3 * layout.block_size_tokens)
        here = await control.open_session(pool_id, layout)
        there = await control.open_session(other_pool_id, layout)
        source, target = DataClient(here.shards[0].address), DataClient(there.shards[0].address)
        async with here, there, source, target, await source.open(here.grant) as execution:
            await prefill(here, execution, prompt)
            async with PrefixMover(here, there) as mover:
                moved = await mover.move(1, prompt, max_total_tokens=len(prompt) + 8)

            read = await source.read_blocks(here.grant, 1, num_blocks=3)
            back = await target.read_blocks(there.grant, 1, num_blocks=3)
            (cached,) = await control.find_prefix(prompt, pool_ids=[other_pool_id])
            print(f"moved {moved.num_bytes} bytes, the same there: {back.blocks == read.blocks}")
            print(f"cached in {other_pool_id}: {cached.num_cached_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
