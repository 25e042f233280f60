"""Long prefills beside a small decode: the data plane's one thread is shared by its callers."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

from data_plane.server.tensor_codec import tensor_to_message
from kvplane import DataClient
from kvplane.execution.execution import Execution
from kvplane.tensor import Tensor
from tests.helpers.attacked_planes import LONGEST_S, p99
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.data.plan_author import BLOCK_SIZE, set_blocks, span, tokens

NUM_ROWS = 6144
NUM_GREEDY = 3
WARM_UP_S = 0.5
PERIOD_S = 1.5
ATTEMPTS = 3


async def start(
    stack: AsyncExitStack, address: str, author: object, session_id: int, num_rows: int
) -> tuple[Execution, tuple[Tensor, Tensor, Tensor]]:
    """A session on a connection of its own that computes a prompt of so many tokens, in blocks of
    its own; and a layer's tensors.
    """
    client = await stack.enter_async_context(DataClient(address, timeout_s=60))
    execution = await stack.enter_async_context(await client.open(author.grant(session_id)))
    first = (session_id - 1) * NUM_ROWS // BLOCK_SIZE
    blocks = [(first + i, 1) for i in range(num_rows // BLOCK_SIZE)]
    changes = [set_blocks(1, blocks)]
    await execution.start(author.plan(1, session_id, changes=changes, spans=[span(1, 0, num_rows)]))
    parts = tokens(num_rows, 4), tokens(num_rows, seed=1), tokens(num_rows, seed=2)
    query, key, value = (Tensor.from_proto(tensor_to_message(part)) for part in parts)
    return execution, (query, key, value)


async def latencies(execution: Execution, parts: tuple[Tensor, ...], seconds: float) -> list[float]:
    end_s = time.perf_counter() + seconds
    took = []
    while (begin_s := time.perf_counter()) < end_s:
        await execution.layer(0, *parts)
        took.append(time.perf_counter() - begin_s)
    return took


async def neighbour_beside_prefills(folder: Path) -> tuple[float, float]:
    """How long a prefill's layer takes among the others, and the 99th percentile of how long one of
    a few rows does, in seconds.
    """
    num_blocks = (NUM_GREEDY + 1) * NUM_ROWS // BLOCK_SIZE
    async with AsyncExitStack() as stack:
        server, side = await stack.enter_async_context(
            serving(folder, num_device_blocks=num_blocks, num_host_blocks=0)
        )
        author, address = author_of(server, side), server.address
        greedy = [
            await start(stack, address, author, i, NUM_ROWS) for i in range(1, NUM_GREEDY + 1)
        ]
        small = await start(stack, address, author, NUM_GREEDY + 1, BLOCK_SIZE)
        prefills = [asyncio.create_task(latencies(*each, WARM_UP_S + PERIOD_S)) for each in greedy]
        await asyncio.sleep(WARM_UP_S)
        took = await latencies(*small, PERIOD_S)
        prefilled = [seconds for task in prefills for seconds in await task]
        return sum(prefilled) / len(prefilled), p99(took)


async def test_a_small_layer_does_not_wait_for_long_ones(tmp_path: Path) -> None:
    """In one of a few tries: other work on the machine can hold all up for a moment."""
    tried = []
    for i in range(ATTEMPTS):
        folder = tmp_path / str(i)
        folder.mkdir()
        prefill_s, small_s = await neighbour_beside_prefills(folder)
        if small_s < LONGEST_S + prefill_s / 4:
            return
        tried.append(f"{small_s:.3f} s beside layers of {prefill_s:.3f} s")
    raise AssertionError("; ".join(tried))
