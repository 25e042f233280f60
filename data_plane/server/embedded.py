"""A data plane inside another process: its executor is called directly, with tensors.

A background thread keeps it registered and serves gRPC to other processes. This process holds the
pool's key, so such a pool is for one tenant.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Protocol

from data_plane.execution.executor import Executor
from data_plane.server.config import DataPlaneSettings
from data_plane.server.embedded_execution import EmbeddedExecution
from data_plane.server.server import DataPlaneServer
from kvplane.errors import PoolNotReadyError
from kvplane.layout import Layout
from kvplane.results import Signed
from kvplane.serving import event_loop


class ExecutedSession(Protocol):
    """The part of a session that an execution needs; a ``kvplane.sync.Session`` has it."""

    @property
    def grant(self) -> Signed:
        """The session's grant: its signed rights at a data plane."""

    def add_receipt(self, receipt: Signed | None) -> None:
        """Submit a receipt with the next step."""


class EmbeddedDataPlane:
    """A data plane in this process: ``with EmbeddedDataPlane(config) as plane:
    plane.open_execution(session)``.

    Executor calls may come from any thread. A call that runs when the plane stops is finished. When
    the device fails for good, or a later process takes the shard over, the plane ends its
    registration, and every call fails.
    """

    def __init__(self, config: DataPlaneSettings, layout: Layout | None = None) -> None:
        """``layout``: the pool's layout, which replaces ``model`` and ``layout`` of ``config``."""
        self._config = config
        self._layout = layout
        self._server: DataPlaneServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="data-plane-loop", daemon=True)
        self._ready = threading.Event()
        self._registered = threading.Event()
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> EmbeddedDataPlane:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 30.0) -> Executor:
        """Start the server, and wait until the data plane is registered with its control plane.

        Raises what ``DataPlaneServer.start`` raises, and PoolNotReadyError after ``timeout_s``.
        """
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        if not self._registered.wait(timeout_s):
            self.stop()
            raise PoolNotReadyError(
                f"the data plane could not register with {self._config.control_plane} within "
                f"{timeout_s:g} s: see its log"
            )
        return self.executor

    @property
    def executor(self) -> Executor:
        """The data plane's executor. Raises PoolNotReadyError before ``start``."""
        if self._server is None:
            raise PoolNotReadyError("the data plane has not been started: call start")
        return self._server.executor

    def open_execution(self, session: ExecutedSession) -> EmbeddedExecution:
        """Open an execution, which runs the plans of a ``kvplane.sync.Session`` and adds each
        plan's receipt to it. Raises what ``Executor.open`` does.
        """
        return EmbeddedExecution(self.executor, session.grant, take_receipt=session.add_receipt)

    @property
    def address(self) -> str:
        """Address of the data plane's gRPC server, "host:port". Raises as ``executor`` does."""
        if self._server is None:
            raise PoolNotReadyError("the data plane has not been started: call start")
        return self._server.address

    def stop(self) -> None:
        """End the registration and stop serving. Does nothing if it has stopped."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            event_loop.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._server = await DataPlaneServer.start(self._config, layout=self._layout)
        self._ready.set()
        registered = asyncio.create_task(self._server.registered.wait())
        registered.add_done_callback(lambda _: self._registered.set())
        try:
            await self._server.run_until(self._stop.wait())
        finally:
            registered.cancel()
