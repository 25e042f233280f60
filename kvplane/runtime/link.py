"""A session with a control plane, for callers without an event loop: an engine, or caches.

At any time there is at most one session. A receipt is added as soon as it is there and sent with
the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Final

from kvplane import ops
from kvplane.clients.control_client import ControlClient
from kvplane.errors import (
    InternalError,
    KvplaneError,
    SessionNotFoundError,
    StaleError,
    UnavailableError,
)
from kvplane.layout import Layout
from kvplane.prefixes import Loaded, PrefixLoader
from kvplane.results import PoolInfo, SequenceState, Signed, StepResult
from kvplane.session import Session
from kvplane.sync.loop_thread import LoopThread, Pending, wait
from kvplane.transport.tls import Tls

_LOGGER: Final = logging.getLogger(__name__)
_CLIENT_NAME: Final = "kvplane engine"
_LOADER_NAME: Final = "kvplane engine, files"
_CLOSE_TIMEOUT_S: Final = 2.0
_READY_S: Final = 1.0
# How long to wait for planes before the log says so.
_SILENT_S: Final = 2.0


class ControlLink:
    """Connects a caller without an event loop to one control plane, one pool and one session."""

    def __init__(
        self,
        loop: LoopThread,
        address: str,
        pool_id: str,
        timeout_s: float,
        tls: Tls | None = None,
    ) -> None:
        self._loop = loop
        self._address = address
        self._pool_id = pool_id
        self._client = loop.call(lambda: ControlClient(address, tls=tls, timeout_s=timeout_s))
        self._timeout_s = timeout_s
        self.namespace = ""
        """Namespace of the sessions that are opened from now on."""
        self._session: Session | None = None
        self._layout: Layout | None = None
        self._loader: tuple[PrefixLoader, Session] | None = None  # loads blocks from files
        self._opening_loader = asyncio.Lock()
        self._last_plan_number = 0
        self._submitting: Pending[None] | None = None  # receipts, which nobody has waited for

    @property
    def session(self) -> Session:
        """The open session. Raises InternalError when there is none."""
        if self._session is None:
            raise InternalError("no session is open")
        return self._session

    def pool_layout(self, wait_s: float) -> Layout:
        """Return the pool's layout, once it is ready. Raises UnavailableError after ``wait_s``
        seconds; logs what it waits for when that takes long.
        """
        self._loop.run(self._wait_ready(wait_s))
        return self.get_pool().layout

    async def _wait_ready(self, wait_s: float) -> None:
        waiting = asyncio.create_task(self._client.wait_ready(self._pool_id, wait_s))
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if wait_s > _SILENT_S:
                try:
                    await self._client.wait_ready(self._pool_id, _SILENT_S)
                except UnavailableError as error:
                    _LOGGER.warning(
                        "waiting control_plane=%s pool_id=%s at_most_s=%g %s",
                        self._address,
                        self._pool_id,
                        wait_s,
                        error.__cause__ or error,
                    )
            await waiting
        finally:
            waiting.cancel()

    def get_pool(self) -> PoolInfo:
        """Fetch the pool's description from the control plane, after submitting receipts."""
        self._wait_submitted()
        return self._loop.run(self._client.get_pool(self._pool_id))

    def is_ready(self) -> Future[bool]:
        """Ask the control plane whether sessions can be opened on the pool, without waiting. The
        future raises PlaneUnavailableError or DeadlineExceededError when it does not answer.
        """

        async def ready() -> bool:
            return (await self._client.get_pool(self._pool_id, timeout_s=_READY_S)).ready

        return self._loop.begin(ready())

    def get_counters(self) -> dict[str, int]:
        """Fetch the pool's counters after submitting receipts: ``ControlClient.get_counters``."""
        self._wait_submitted()
        return self._loop.run(self._client.get_counters(self._pool_id))

    def _wait_submitted(self) -> None:
        submitting, self._submitting = self._submitting, None
        if submitting is not None:
            wait(submitting)

    def open(self, layout: Layout, timeout_s: float | None = None) -> Session:
        """Open a session; an earlier one is closed first, if its control plane still knows it."""
        self._forget_session(timeout_s)
        self._layout = layout

        async def opened() -> Session:
            return await self._client.open_session(
                self._pool_id,
                layout,
                client_name=_CLIENT_NAME,
                namespace=self.namespace,
                timeout_s=timeout_s,
            )

        self._session = self._loop.run(opened())
        return self._session

    def begin_step(self, operations: Sequence[ops.Operation]) -> Pending[StepResult]:
        """Send a step with all added receipts, without waiting for its answer. Every later call,
        such as the next step, is made after it.
        """
        session = self.session

        async def step() -> StepResult:
            result = await session.step(operations)
            if result.plan is not None:
                self._last_plan_number = session.last_number
            return result

        return self._loop.send(step())

    def step(self, operations: Sequence[ops.Operation]) -> StepResult:
        """Make one step with all added receipts."""
        return wait(self.begin_step(operations))

    def has_news(self, wait_s: float) -> bool:
        """Return whether news were pushed since the last step, or are within ``wait_s`` seconds.
        The next step's answer has them.
        """
        return self._loop.run(self.session.wait_for_news(wait_s))

    @property
    def has_file_tier(self) -> bool:
        """Return whether all data planes of the pool keep blocks in files."""
        return all(shard.has_file_tier for shard in self.session.shards)

    def begin_load(self, tokens: Sequence[int]) -> Future[Loaded]:
        """Begin to load the blocks of a prompt that data planes have in files, in a second session,
        without waiting. The future raises what ``PrefixLoader.load`` does.
        """
        return self._loop.begin(self._load([*tokens]))

    async def _load(self, tokens: Sequence[int]) -> Loaded:
        loader = await self._open_loader()
        try:
            return await loader.load(tokens)
        except (StaleError, SessionNotFoundError):  # since its session was opened
            await self._close_loader(loader)
            return await (await self._open_loader()).load(tokens)

    async def _open_loader(self) -> PrefixLoader:
        async with self._opening_loader:
            if self._loader is None:
                session = await self._client.open_session(
                    self._pool_id,
                    self._layout or self.session.layout,
                    client_name=_LOADER_NAME,
                    namespace=self.namespace,
                )
                loader = PrefixLoader(self._client, session, timeout_s=self._timeout_s)
                self._loader = loader, session
            return self._loader[0]

    async def _close_loader(self, loader: PrefixLoader | None = None) -> None:
        """Close the loader of prefixes; if ``loader`` is given, only if it is that one."""
        opened = self._loader
        if opened is None or loader not in (None, opened[0]):
            return
        self._loader = None
        with contextlib.suppress(KvplaneError):
            await opened[0].close()
            await opened[1].close(timeout_s=_CLOSE_TIMEOUT_S)

    def add_receipts(self, receipts: Iterable[Signed]) -> None:
        """Add receipts, which the next step submits."""
        session = self.session

        def add() -> None:
            for receipt in receipts:
                session.add_receipt(receipt)

        self._loop.post(add)

    def submit_receipts(self) -> None:
        """Submit receipts without a step and without waiting for the answer."""
        session = self._session
        if session is None:  # reopening it failed, so there is nothing to submit
            return

        async def submit() -> None:
            try:
                await session.submit_receipts()
            except KvplaneError as error:
                _LOGGER.warning("receipts were not submitted: %s", error)

        self._submitting = self._loop.send(submit())

    def abort_last_plan(self) -> list[SequenceState]:
        """Abort the last plan. Returns the states of all the session's sequences afterwards."""
        return self._loop.run(self.session.abort_plans(self._last_plan_number)).sequences

    def close(self) -> None:
        """Close session and channel."""
        self._loop.run(self._close_loader())
        self._forget_session()
        self._loop.run(self._client.close())

    def _forget_session(self, timeout_s: float | None = None) -> None:
        session, self._session = self._session, None
        if session is not None:
            # If that fails, its lease ends it, or it has ended with its planes.
            with contextlib.suppress(KvplaneError):
                most_s = min(timeout_s or _CLOSE_TIMEOUT_S, _CLOSE_TIMEOUT_S)
                self._loop.run(session.close(timeout_s=most_s))
