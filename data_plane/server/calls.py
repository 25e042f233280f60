"""What the data plane's services share: a call becomes commands of the executor, which run on the
worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from data_plane.execution.executor import Executor
from data_plane.server.fair_queue import Lane
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.serving.callers.identity import caller, payer
from kvplane.slices import Slices, whole

T = TypeVar("T")


class Calls:
    """Runs gRPC calls as commands of the executor on the worker thread."""

    def __init__(
        self, executor: Executor, worker: WorkerThread, *, knows_callers: bool = False
    ) -> None:
        """``knows_callers``: callers are authenticated, so grants must be their own."""
        self._executor = executor
        self._worker = worker
        self._knows_callers = knows_callers

    async def run(self, command: Callable[[], T]) -> T:
        """Run ``command`` on the worker thread in the caller's turn, and return its result."""
        return await self.run_slices(lambda: whole(command))

    async def run_slices(self, command: Callable[[], Slices[T]], session_id: int = 0) -> T:
        """Run a command as ``run`` does, in slices between which other commands run.
        ``session_id``: 0 where it is not known yet. Copies of tensors to and from a device are not
        commands of the executor, so their failures are checked here.
        """
        try:
            return await self._worker.run_slices(command, Lane(payer(), session_id))
        except InternalError:
            await self._worker.run(self._executor.device_watch.check)
            raise

    def tenant(self) -> str | None:
        """Return the current caller's tenant; None where callers are not authenticated."""
        return caller().tenant if self._knows_callers else None


def refuse_fields(request: Message, fields: Iterable[str], why: str, prefix: str = "") -> None:
    """Raise InvalidRequestError naming the first of ``fields`` that ``request`` has."""
    present = {field.name for field, _ in request.ListFields()}
    for field in fields:
        if field in present:
            raise InvalidRequestError(why, field=f"{prefix}{field}")
