"""A client of kvplane: admits a prompt, computes it with made-up q, k and v, and finds it cached.

Start both planes with `make serve`, then: python examples/quickstart.py [control plane's address]
"""

from __future__ import annotations

import asyncio
import random
import sys

from kvplane import ControlClient, Tensor, ops


async def main(control_plane: str) -> None:
    """Admit a prompt, execute it, submit the receipt, look it up."""
    async with ControlClient(control_plane) as control:
        (pool_id, *_) = await control.list_pools()
        async with (
            control.open_session(pool_id, client_name="quickstart") as session,
            session.open_execution() as execution,
        ):
            prompt = random.choices(range(256), k=2 * session.layout.block_size_tokens + 1)
            admitted = await session.run(ops.admit(1, prompt))
            await execution.start(admitted.plan)
            (before,) = await control.find_prefix(prompt, pool_ids=[pool_id])
            for layer in execution.layers:
                qkv = [made_up(session.layout.dtype, execution.key_shape(layer)) for _ in "qkv"]
                output = await execution.layer(layer, *qkv)
            print(f"plan {session.last_number} ran, attention {list(output.shape)} in each layer")

            await session.submit_receipts()
            (after,) = await control.find_prefix(prompt, pool_ids=[pool_id])
            print(f"cached before the receipt: {before.num_cached_tokens} tokens")
            print(f"cached after the receipt: {after.num_cached_tokens} of {len(prompt)} tokens")


def made_up(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of small numbers: bytes below 64 are small in every dtype."""
    num_bytes = Tensor.size_bytes(dtype, shape)
    return Tensor(dtype, shape, bytes(random.choices(range(64), k=num_bytes)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["127.0.0.1:50051"]))
