"""A session that keeps chunks of bytes in a pool of opaque pages, as an engine's plug-in does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Execution, Session, Tensor, ops
from kvplane.prefixes import tokens_of as named
from kvplane.results import Pinned, ShardBlocks
from tests.helpers.planes_in_process import data_plane, settings_of

POOL = "chunks"
PAGE_BYTES = 256
PATIENCE_S = 30.0
CHUNKS = {b"first": b"one" * 50, b"second": b"two" * 85 + b"!", b"third": b""}
"""By name, the bytes of three chunks: some of a page, all of one, and none."""


class Store:
    """A session that keeps chunks of bytes by their names."""

    def __init__(
        self, control: ControlClient, session: Session, execution: Execution, plane: DataPlaneServer
    ) -> None:
        self.control, self.session, self.execution, self.plane = control, session, execution, plane
        self.last_id = 0

    async def admit(self, name: bytes) -> int:
        """Admit the name's block and start its plan; returns the sequence's id."""
        self.last_id += 1
        step = await self.session.run(ops.admit(self.last_id, named(name)))
        await self.execution.start(step.plan)
        return self.last_id

    async def free(self, *sequence_ids: int) -> None:
        await self.execution.start((await self.session.run(ops.free(sequence_ids))).plan)
        await self.session.submit_receipts()

    async def put(self, chunks: Mapping[bytes, bytes]) -> None:
        """Store chunks: a step and a write, whose receipt goes with the next step."""
        ids = range(self.last_id + 1, self.last_id + 1 + len(chunks))
        self.last_id = ids[-1]
        admissions = zip(ids, chunks, strict=True)
        step = await self.session.step(
            [ops.admit(i, named(name), ends_with_plan=True) for i, name in admissions]
        )
        assert step.plan is not None
        if any(result.failures for result in step.results):
            await self.execution.start(step.plan)  # it may say that earlier ones have ended
            step.raise_for_status()
        await self.execution.write_pages(step.plan, ids, [*chunks.values()], keys=[*chunks])
        await self.session.submit_receipts()

    async def pin(self, *names: bytes) -> Pinned:
        """Pin chunks by their names."""
        self.last_id += len(names)
        pins = range(self.last_id - len(names) + 1, self.last_id + 1)
        step = await self.session.run(ops.pin(pins, [*map(named, names)]))
        assert step.plan is None
        return step.results[0].pinned

    async def get(self, name: bytes, *, key: bytes | None = None) -> bytes | None:
        """The bytes of a chunk; None if it is not there. ``key``: asked for in the name's place."""
        pinned = await self.pin(name)
        if not pinned.num_blocks[0]:
            return None
        page = bytearray(b"\xee" * PAGE_BYTES)
        (num_bytes,) = await self.execution.read_pages(
            pinned, [memoryview(page)], keys=[name if key is None else key]
        )
        await self.session.step([ops.unpin(self.last_id)])
        return bytes(page[:num_bytes])

    async def num_cached(self, name: bytes) -> int:
        (match,) = await self.control.find_prefix(named(name), pool_ids=[POOL])
        return match.num_cached_tokens


def page_of(data: bytes) -> ShardBlocks:
    page = Tensor("uint8", (1, 1, PAGE_BYTES), data.ljust(PAGE_BYTES, b"\xee"))
    return ShardBlocks(page, num_bytes=(len(data),))


@asynccontextmanager
async def store(
    server: ControlPlaneServer, *, shared_memory: bool = True, **settings: Any
) -> AsyncIterator[Store]:
    """A data plane of opaque pages, registered with the control plane, and a session."""
    wanted: dict[str, Any] = {"opaque_page_bytes": PAGE_BYTES, "model_id": "engine/tiny"}
    wanted |= settings
    async with AsyncExitStack() as stack:
        given = settings_of(POOL, server.address, Path(), **wanted) | {"layout": None}
        plane = await stack.enter_async_context(data_plane(**given))
        client = ControlClient(server.address, timeout_s=PATIENCE_S, shared_memory=shared_memory)
        control = await stack.enter_async_context(client)
        await control.wait_ready(POOL, timeout_s=60)
        session = await stack.enter_async_context(control.open_session(POOL))
        execution = await stack.enter_async_context(session.open_execution())
        yield Store(control, session, execution, plane)
