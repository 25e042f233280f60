"""Data plane and control plane in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.reports_ahead.plane import Figures, Plane
from control_plane.planning.config import CoreConfig
from control_plane.planning.core import ControlPlane
from data_plane.server.registration_stream import BLOCKS_PER_REPORT
from kvplane.v1 import control_pb2 as cpb


class InProcess:
    """Data plane and control plane exchange packed messages."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        config = CoreConfig(lease_s=3600.0)
        self.core = ControlPlane(incarnation=time.time_ns(), config=config, clock=time.monotonic)
        self.figures = Figures()

    def tell_ahead(self) -> None:
        """As often as it takes until the control plane's own digests are computed too."""
        self.core.register_ahead(self._plane.hello)
        ahead, hello = self.core.ahead, self._plane.hello
        for _ in range(2):
            self._report(
                lambda part: ahead.compare(hello, part), lambda part: ahead.report(hello, part)
            )

    def lead(self) -> Figures:
        """From Hello to the pool that is built."""
        self.figures = Figures()
        hello, core = self._plane.hello, self.core
        began = time.perf_counter()
        welcome = core.register(hello)
        where = (hello.pool_id, hello.shard.index, hello.epoch)
        if welcome.compares:

            def compare(part: cpb.BlockDigests) -> cpb.ReportRequest | None:
                asked = core.compare(*where, part)
                return None if asked is None else asked[0]

            self._report(compare, lambda part: core.report(*where, part))
        else:
            for part in self._of_plane(lambda: self._plane.report(BLOCKS_PER_REPORT)):
                self._send(part, lambda part: core.report(*where, part))
        core.take_told()
        while core.has_work():
            self._timed(core.work)
            core.take_told()
        self.figures.seconds = time.perf_counter() - began
        described = core.describe_pool(hello.pool_id)
        assert described.ready
        self.figures.num_cached = described.usage.tiers[0].num_cached_blocks
        core.check_integrity()
        return self.figures

    def _report(self, compare: Callable[[Any], Any], report: Callable[[Any], Any]) -> None:
        plane = self._plane
        while self._of_plane(lambda: plane.digests.refresh(128)):
            pass
        asked = cpb.ReportRequest()
        for digests in self._of_plane(lambda: plane.digests.messages(0))[1]:
            asked = self._send(digests, compare) or asked
        parts = self._of_plane(lambda: plane.report(BLOCKS_PER_REPORT, [*asked.ranges]))
        for part in parts:
            self._send(part, report)

    def _of_plane(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self.figures.plane_s += time.perf_counter() - began
        return result

    def _send(self, message: Any, take: Callable[[Any], Any]) -> Any:
        packed = message.SerializeToString()
        self.figures.num_bytes += len(packed)
        return self._timed(lambda: take(type(message).FromString(packed)))

    def _timed(self, call: Callable[[], Any]) -> Any:
        """In processor time, so that other work on the machine does not count."""
        began = time.thread_time()
        result = call()
        self.figures.longest_s = max(self.figures.longest_s, time.thread_time() - began)
        return result
