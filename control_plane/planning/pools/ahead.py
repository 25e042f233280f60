"""What data planes report to a control plane that stands by, for the day on which it leads.

    stands by   register ──► compare ──► report ──► compare ──► report ...     each a range at most
    leads                                                     take ──► compare ──► report the rest

No pool is made of it, and nothing here decides anything: when this control plane leads, each data
plane that registers is compared with what it said, and reports what differs.
"""

from __future__ import annotations

from control_plane.planning.pools.reports import Reports, is_same_run
from control_plane.planning.pools.shards import num_blocks_of, total_blocks
from kvplane.errors import QuotaExceededError, StaleEpochError
from kvplane.layout import Layout
from kvplane.v1 import control_pb2 as cpb


class ReportsAhead:
    """Of all pools. ``max_pools`` and ``max_blocks`` bound what is kept."""

    def __init__(self, max_pools: int, max_blocks: int) -> None:
        self._max_pools = max_pools
        self._max_blocks = max_blocks
        self._pools: dict[str, Reports] = {}
        self._heard: set[str] = set()  # pools of which something came since forget_silent
        self._heard_s: dict[str, float] = {}  # when that was last, to a call

    @property
    def num_blocks(self) -> int:
        """Blocks of the processes that have reported."""
        return sum(
            total_blocks(hello)
            for reports in self._pools.values()
            for hello in reports.said_by.values()
        )

    def register(self, hello: cpb.Hello, layout: Layout) -> None:
        """A process begins to report, or goes on. ``hello``: valid, with this layout.

        Raises StaleEpochError when a later process has reported, and QuotaExceededError.
        """
        index = hello.shard.index
        reports = replaced = self._pools.get(hello.pool_id)
        if reports is not None and not reports.fits(hello.shard.num_shards, layout):
            reports = None  # the pool has another shape now
        known = None if reports is None else reports.said_by.get(index)
        if known is not None:
            if is_same_run(hello, known):
                return
            _check_later(hello, known)
        goes = [] if known is None else [known]
        if reports is None and replaced is not None:
            goes = [*replaced.said_by.values()]
        num_kept = self.num_blocks - sum(map(total_blocks, goes))
        if num_kept + total_blocks(hello) > self._max_blocks:
            raise QuotaExceededError(
                f"reports of {self._max_blocks} blocks are kept, the most: start this control "
                "plane with a higher --max-blocks",
                field="hello.num_device_blocks",
            )
        if reports is None:
            if hello.pool_id not in self._pools and len(self._pools) >= self._max_pools:
                raise QuotaExceededError(
                    f"reports of {self._max_pools} pools are kept, the most", field="hello.pool_id"
                )
            reports = self._pools[hello.pool_id] = Reports(layout, hello.shard.num_shards)
        reports.start(index, num_blocks_of(hello))
        reports.said_by[index] = hello

    def start(self, hello: cpb.Hello) -> None:
        """Another stream of the process begins."""
        self._of(hello).digests[hello.shard.index].start()
        self.heard(hello)

    def compare(self, hello: cpb.Hello, part: cpb.BlockDigests) -> cpb.ReportRequest | None:
        """Compare what a process holds with what it reported; after the last part, what it is to
        report. Raises InvalidRequestError, and StaleEpochError when it was replaced.
        """
        digests = self._of(hello).digests[hello.shard.index]
        digests.compare(part)
        if not part.last:
            return None
        request, _ = digests.finish(all_ranges=False)
        return request

    def report(self, hello: cpb.Hello, part: cpb.BlockReport) -> None:
        """Add a part of a process's report. Raises as ``compare``."""
        self._of(hello).add(hello.shard.index, num_blocks_of(hello), part)

    def take(self, pool_id: str, num_shards: int, layout: Layout) -> Reports | None:
        """What was reported of a pool of this shape, which is not kept here any more."""
        reports = self._pools.pop(pool_id, None)
        return reports if reports is not None and reports.fits(num_shards, layout) else None

    def heard(self, hello: cpb.Hello) -> None:
        """A process that has registered is there."""
        if hello.pool_id in self._pools:
            self._heard.add(hello.pool_id)

    def forget_silent(self, now_s: float, longest_s: float) -> None:
        """Forget the pools of which nothing came for so long. ``now_s``: monotonic seconds."""
        self._heard_s.update(dict.fromkeys(self._heard, now_s))
        self._heard.clear()
        silent = {pool_id for pool_id, at_s in self._heard_s.items() if now_s - at_s >= longest_s}
        for pool_id in silent | (self._heard_s.keys() - self._pools.keys()):
            del self._heard_s[pool_id]
            self._pools.pop(pool_id, None)

    def _of(self, hello: cpb.Hello) -> Reports:
        reports = self._pools.get(hello.pool_id)
        known = None if reports is None else reports.said_by.get(hello.shard.index)
        if reports is None or known is None or not is_same_run(hello, known):
            raise StaleEpochError("what this process reported ahead is not kept any more")
        return reports


def _check_later(hello: cpb.Hello, known: cpb.Hello) -> None:
    if hello.epoch < known.epoch:
        raise StaleEpochError(
            f"a later process of the shard has reported, of epoch {known.epoch}",
            field="hello.epoch",
        )
