"""A bridge as a process, and a consumer of it with vLLM's decoder and Dynamo's rules."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from kvplane import ControlClient
from kvplane.prefixes import BlocksStored, CaughtUp
from tests.e2e.engine_planes import free_port
from tests.helpers.programs import Program
from tests.helpers.waiting import wait_until

PATIENCE_S = 60.0
END = b"\xff" * 8
MEDIA = {1: "GPU", 2: "CPU"}

# The classes of vllm/distributed/kv_events.py, of release 0.33. Until June 2026 events too had
# array_like=True.
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

Held = dict[tuple[int, str], tuple[int | None, tuple[int, ...]]]
"""The hash before a block, and its tokens, by the block's hash and medium."""


def number_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big")


class Consumer:
    """What a router knows by a bridge's events. ``is_array``: the format of events."""

    def __init__(self, port: int, *, is_array: bool = False) -> None:
        names: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "IS_ARRAY": is_array}
        exec(compile(KV_EVENTS, "kv_events.py", "exec", dont_inherit=True), names)
        self._decoder = msgspec.msgpack.Decoder(names["KVEventBatch"])
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe("")
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self.held: Held = {}
        self.kinds: list[str] = []
        self.seq = -1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def until(self, held: Held) -> None:
        """Take events until what is held is this."""
        async with asyncio.timeout(PATIENCE_S):
            while self.held != held:
                await self.take()

    async def take(self) -> None:
        """Apply the next batch, unless its number has been passed: Dynamo drops it then."""
        topic, seq, payload = await self._events.recv_multipart()
        assert (topic, len(seq)) == (b"", 8)
        if int.from_bytes(seq, "big") > self.seq:
            self.seq = int.from_bytes(seq, "big")
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        assert abs(batch.ts - time.time()) < PATIENCE_S
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.kinds.append(type(event).__name__)
            if self.kinds[-1] == "AllBlocksCleared":
                self.held.clear()
            elif self.kinds[-1] == "BlockRemoved":
                for block_hash in event.block_hashes:
                    del self.held[block_hash, event.medium]
            else:
                self._store(event)

    def _store(self, event: Any) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert parent is None or any(parent == known for known, _ in self.held), "parents first"
        assert (event.lora_id, event.lora_name) == (None, None)
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            self.held[block_hash, event.medium] = parent, tokens
            parent = block_hash

    async def replay(self, port: int, first: int) -> list[tuple[int, bytes]]:
        """Ask for the batches from a number on, as Dynamo does; their numbers and payloads."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        async with asyncio.timeout(PATIENCE_S):
            while True:
                empty, seq, payload = await socket.recv_multipart()
                assert empty == b""
                if not payload:
                    assert seq == END
                    return batches
                batches.append((int.from_bytes(seq, "big"), payload))


class Bridge:
    """``python -m kvplane.integrations.events`` on ports of its own. It has to be started."""

    def __init__(self, folder: Path, control_plane: str, *flags: str) -> None:
        self.port, self.replay_port, self.log = free_port(), free_port(), folder / "events.log"
        self._flags = (
            *("--bind", f"tcp://127.0.0.1:{self.port}"),
            *("--replay", f"tcp://127.0.0.1:{self.replay_port}"),
            *("--control-plane", control_plane, *flags),
        )

    def start(self) -> None:
        self.process = Program("kvplane.integrations.events", *self._flags, out=self.log)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_to_log(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text())


async def cached(control: ControlClient, pool: str) -> Held:
    """Return what the control plane says is cached."""
    held: Held = {}
    async for event in control.watch_prefixes(pool):
        if isinstance(event, BlocksStored):
            for block in event.blocks:
                parent = number_of(block.parent_hash) if any(block.parent_hash) else None
                key = number_of(block.block_hash), MEDIA[block.tier]
                held[key] = parent, tuple(block.token_ids)
        if isinstance(event, CaughtUp):
            return held
    raise AssertionError
