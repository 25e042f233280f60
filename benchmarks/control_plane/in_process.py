"""The control plane's core in this process: packed requests in, packed answers out.

Timed is the gRPC service's work for a request before it answers: parse it, call the core, collect
the notified sessions, and serialise the answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.control_plane import messages
from benchmarks.control_plane.engine import Engine, Wire
from benchmarks.control_plane.messages import EPOCH, POOL
from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from kvplane.slices import run_to_end
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import session_pb2 as cpb

TENANT: Final = "tenant"


class CorePool:
    """A core with one pool, and all its sessions."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        """Make the pool, which is ready once ``report`` has given its report."""
        self.core = ControlPlane(
            incarnation=time.time_ns(), config=CoreConfig(lease_s=3600.0), clock=time.monotonic
        )
        self.key = self.core.register(messages.hello(num_device_blocks, num_host_blocks)).key
        self._num_engines = 0
        self.on_outgoing: Callable[[list[rpb.RegisterResponse]], None] = lambda outgoing: None
        """Gets the messages for the data plane."""

    def report(self, part: bytes) -> float:
        """Take a part of the data plane's report, serialised; return the thread's seconds."""
        began = time.thread_time()
        self.core.report(POOL, 0, EPOCH, rpb.RegisterRequest.FromString(part).report)
        return time.thread_time() - began

    def work(self) -> float | None:
        """Do a slice of the core's long work; return its seconds, or None when nothing is left."""
        began = time.thread_time()
        self.core.take_notified()
        if not self.core.has_work():
            return None
        self.core.work()
        return time.thread_time() - began

    async def engine(self, wire: Wire | None = None) -> Engine:
        """Open a session, whose requests ``wire`` carries; None: this pool."""
        session = self.core.open_session(messages.open_session(), TENANT).session
        first_id = 1 + 1_000_000 * self._num_engines
        self._num_engines += 1
        return Engine(wire or self, session, self.key, first_id=first_id)

    async def step(self, request: cpb.StepRequest) -> tuple[cpb.StepResponse, float]:
        data = request.SerializeToString()
        began = time.perf_counter()
        answer = run_to_end(self.core.run(cpb.StepRequest.FromString(data), TENANT))
        self.core.take_notified()
        seconds = time.perf_counter() - began
        answer.settle()
        self.on_outgoing(self.core.take_outgoing(POOL, 0))
        return cpb.StepResponse.FromString(answer.step), seconds

    async def abort(self, request: cpb.AbortPlansRequest) -> float:
        data = request.SerializeToString()
        began = time.perf_counter()
        answer = self.core.abort_plans(cpb.AbortPlansRequest.FromString(data), TENANT)
        self.core.take_notified()
        answer.SerializeToString()
        seconds = time.perf_counter() - began
        self.on_outgoing(self.core.take_outgoing(POOL, 0))
        return seconds

    def description(self) -> pool_pb2.GetPoolResponse:
        """Return the pool's present description."""
        return self.core.get_pool(POOL)


class InProcess:
    """A world whose control planes are in this process."""

    name = "core"

    @asynccontextmanager
    async def pool(
        self, num_device_blocks: int, num_host_blocks: int = 0
    ) -> AsyncIterator[CorePool]:
        pool = CorePool(num_device_blocks, num_host_blocks)
        report = rpb.RegisterRequest(report=rpb.BlockReport(last=True))
        pool.report(report.SerializeToString())
        while pool.work() is not None:
            pass
        yield pool
