"""An engine: one session, whose steps are timed over any wire."""

from __future__ import annotations

import itertools
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from benchmarks.control_plane import messages
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb


class Wire(Protocol):
    """Carries one session's requests. Each call returns the answer and the seconds it took."""

    async def step(self, request: cpb.StepRequest) -> tuple[cpb.StepResponse, float]: ...

    async def abort(self, request: cpb.AbortPlansRequest) -> float: ...


class Engine:
    """One session. Every plan gets its receipt at once, which the next step carries. Steps may be
    sent before earlier ones are answered.

    Ids of sequences begin at ``first_id``. They also seed the prompts, so engines of one pool begin
    far apart.
    """

    def __init__(
        self, wire: Wire, session: tpb.SessionRef, key: bytes, *, first_id: int = 1
    ) -> None:
        self._wire = wire
        self.session = session
        self._key = key
        self._numbers = itertools.count(1)
        self._ids = itertools.count(first_id)
        self._receipts: list[tpb.SignedPayload] = []
        self._last_plan = 0

    def new_ids(self, num: int) -> list[int]:
        """Return sequence ids that were not used before."""
        return list(itertools.islice(self._ids, num))

    async def step(self, *operations: cpb.Operation, is_receipted: bool = True) -> float:
        """Take a step with earlier steps' receipts, all of which must succeed; return the seconds.

        ``is_receipted``: whether its plan gets a receipt.
        """
        number = next(self._numbers)
        receipts, self._receipts = self._receipts, []
        request = cpb.StepRequest(
            session=self.session, number=number, operations=operations, receipts=receipts
        )
        response, seconds = await self._wire.step(request)
        for operation in response.results:
            for failure in operation.failures:
                raise RuntimeError(f"an operation was not done: {failure}")
        if response.HasField("plan"):
            self._last_plan = number
            if is_receipted:
                plan = response.plan
                self._receipts.append(messages.receipt(self._key, self.session, number, plan))
        return seconds

    async def settle(self) -> float:
        """Return the seconds of a step without operations, which carries the last one's receipt."""
        return await self.step()

    async def abort(self) -> float:
        """Abort the last plan, which has no receipt; return the seconds."""
        return await self._abort(plan_number=self._last_plan)

    async def resync(self) -> float:
        """Have all tables sent whole; return the seconds."""
        return await self._abort(whole_tables=True)

    async def _abort(self, **fields: Any) -> float:
        number = next(self._numbers)
        request = cpb.AbortPlansRequest(session=self.session, number=number, **fields)
        return await self._wire.abort(request)


class Pool(Protocol):
    """A pool that is ready."""

    async def engine(self) -> Engine:
        """Open a session of its own."""


class World(Protocol):
    """Where the control plane runs. ``name``: prefix of its rows."""

    name: str

    def pool(
        self, num_device_blocks: int, num_host_blocks: int = 0
    ) -> AbstractAsyncContextManager[Pool]:
        """Run a control plane of its own, with one pool."""
