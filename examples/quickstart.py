"""A client of kvplane: admits a prompt, computes it with made-up q, k and v, and finds it cached.

Start both planes with `make serve`, then: python examples/quickstart.py [control plane's address]
"""

from __future__ import annotations

import asyncio
import random
import sys

from kvplane import ControlClient, DataClient, Layout, Tensor, ops


async def main(control_plane: str) -> None:
    """Admit a prompt, execute it, submit the receipt, look it up."""
    async with ControlClient(control_plane) as control:
        (pool_id, *_) = await control.list_pools()
        layout = Layout.from_proto((await control.wait_ready(pool_id)).layout)
        prompt = random.choices(range(256), k=2 * layout.block_size_tokens + 1)

        session = await control.open_session(pool_id, layout, "quickstart")
        data = DataClient(session.shards[0].address)
        async with session, data, await data.open(session.grant) as execution:
            admitted = await session.run(ops.admit(1, prompt))
            started = await execution.start(admitted.plan)
            for layer in execution.layers:
                qkv = [made_up(layout, started.num_tokens) for _ in "qkv"]
                output = await execution.layer(layer, *qkv)
            print(f"plan {started.plan_number} ran, attention {list(output.shape)} in each layer")

            (before,) = await control.find_prefix(prompt, pool_ids=[pool_id])
            if execution.receipt is not None:
                session.add_receipt(execution.receipt)
            await session.submit_receipts()
            (after,) = await control.find_prefix(prompt, pool_ids=[pool_id])
            print(f"cached before the receipt: {before.num_cached_tokens} tokens")
            print(f"cached after the receipt: {after.num_cached_tokens} of {len(prompt)} tokens")


def made_up(layout: Layout, num_tokens: int) -> Tensor:
    """Return [num_tokens, num_kv_heads, head_size]; bytes below 64 are small in every dtype."""
    group = layout.groups[0]
    shape = (num_tokens, group.num_kv_heads, group.head_size)
    num_bytes = Tensor.size_bytes(layout.dtype, shape)
    return Tensor(layout.dtype, shape, bytes(random.choices(range(64), k=num_bytes)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["127.0.0.1:50051"]))
