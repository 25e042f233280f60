"""A pool with a bridge, and a consumer of its events that has vLLM's classes and Dynamo's rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from kvplane import ControlClient, ops
from tests.e2e.engine_planes import free_port
from tests.helpers.both_planes import LAYOUT, POOL, Planes, run_step
from tests.helpers.programs import Program
from tests.helpers.waiting import until

PATIENCE_S = 60.0
BLOCK = LAYOUT.block_size_tokens

# The classes of vllm/distributed/kv_events.py in release 0.33, where IS_ARRAY is False; until June
# 2026 it was True.
KV_EVENTS = """
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None
class KVCacheEvent(msgspec.Struct, array_like=IS_ARRAY, omit_defaults=True, gc=False, tag=True):
    pass
class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
class AllBlocksCleared(KVCacheEvent):
    pass
class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
"""


def prompt(seed: int, num_blocks: int = 4) -> list[int]:
    return [1000 * seed + i for i in range(num_blocks * BLOCK + 1)]


class Pool:
    """A pool of 16 blocks, and a bridge."""

    def __init__(self, planes: Planes, control: ControlClient, folder: Path) -> None:
        self.planes, self.control = planes, control
        self.port, self.replay_port, self.log = free_port(), free_port(), folder / "events.log"
        self.log.touch()

    def start_bridge(self, *flags: str) -> None:
        bind, replay = (f"tcp://127.0.0.1:{port}" for port in (self.port, self.replay_port))
        flags += ("--bind", bind, "--replay", replay, "--control-plane", self.planes.address)
        program = ("kvplane.integrations.events", "--pool", POOL, *flags)
        self.bridge = Program(*program, out=self.log)

    def kill_bridge(self) -> None:
        self.bridge.kill()
        self.bridge.wait()

    async def logged(self, text: str, num_times: int = 1) -> None:
        """Wait until the bridge has logged a text so many times."""
        await until(lambda: self.log.read_text().count(text) >= num_times, PATIENCE_S)

    async def cache(self, *prompts: list[int]) -> None:
        """Compute prompts one after another."""
        await self.control.wait_ready(POOL)
        async with self.control.open_session(POOL) as session, session.open_execution() as run:
            for i, tokens in enumerate(prompts, 1):
                await run_step(session, run, ops.admit(i, tokens))
                await run_step(session, run, ops.free([i]))

    async def num_cached(self, *prompts: list[int]) -> list[int]:
        """Return how many tokens of each prompt the control plane finds."""
        found = [await self.control.find_prefix(each, pool_ids=[POOL]) for each in prompts]
        return [match.num_cached_tokens for (match,) in found]


@asynccontextmanager
async def bridged_pool(folder: Path) -> AsyncIterator[Pool]:
    """Start planes; the test starts the bridge."""
    settings = {"num_device_blocks": 16, "num_host_blocks": 0}
    async with Planes(folder, data=settings) as planes, ControlClient(planes.address) as control:
        pool = Pool(planes, control, folder)
        try:
            yield pool
        finally:
            pool.kill_bridge()


class Consumer:
    """What a router knows by events. ``is_array``: the format of these."""

    def __init__(self, port: int, topic: bytes = b"", *, is_array: bool = False) -> None:
        names: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "IS_ARRAY": is_array}
        exec(compile(KV_EVENTS, "kv_events.py", "exec", dont_inherit=True), names)
        self._decoder = msgspec.msgpack.Decoder(names["KVEventBatch"])
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(topic)
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self._blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.media: set[str] = set()
        self.kinds: list[str] = []
        self._seq = -1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def until(self, num_cached: list[int], *prompts: list[int]) -> None:
        """Take events until so many tokens of these prompts are known to be cached."""
        async with asyncio.timeout(PATIENCE_S):
            while [self.num_cached(each) for each in prompts] != num_cached:
                await self.take()

    async def take(self) -> None:
        """Apply the next batch, unless its number has been passed: Dynamo drops it then."""
        _, seq, payload = await self._events.recv_multipart()
        if int.from_bytes(seq, "big") > self._seq:
            self._seq = int.from_bytes(seq, "big")
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.kinds.append(type(event).__name__)
            if self.kinds[-1] == "AllBlocksCleared":
                self._blocks.clear()
                continue
            self.media.add(event.medium)
            parent, size = getattr(event, "parent_block_hash", None), BLOCK
            assert parent is None or parent in self._blocks, "parents come first"
            for i, block_hash in enumerate(event.block_hashes):
                if self.kinds[-1] == "BlockRemoved":
                    self._blocks.pop(block_hash, None)
                else:
                    tokens = tuple(event.token_ids[i * size : (i + 1) * size])
                    self._blocks[block_hash] = parent, tokens
                    parent = block_hash

    def num_cached(self, tokens: list[int]) -> int:
        """Return how many leading tokens are known to be cached."""
        following = {link: block_hash for block_hash, link in self._blocks.items()}
        at, num = None, 0
        while at := following.get((at, tuple(tokens[num : num + BLOCK]))):
            num += BLOCK
        return num


async def replay(port: int, first: int) -> list[tuple[int, bytes]]:
    """Ask for the batches from a number on, as Dynamo does; their numbers and payloads."""
    batches = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        async with asyncio.timeout(PATIENCE_S):
            while (batch := await socket.recv_multipart()) != [b"", b"\xff" * 8, b""]:
                assert batch[0] == b""
                batches.append((int.from_bytes(batch[1], "big"), batch[2]))
    return batches
