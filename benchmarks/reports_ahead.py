"""Measures what a next leader gains from reports that were made ahead of time.

    python -m benchmarks.reports_ahead [--num-prompts N] [--quick]

A data plane's own metadata of a million published blocks, and the control plane's core. "all": the
control plane has never been told of it, and gets a full report. The others: it was told all while
it stood by, and then nothing, some ranges of blocks or some blocks have been allocated again.

``core``: both in this process. From Hello to the pool that is built; of which the data plane's
part, the bytes that it sends, and the longest call into the control plane, in processor time.
``grpc``: the control plane is a process of its own that stands by for a lock that this program
holds. From Hello to the first answer that the pool is ready; and the longest that another caller
waited meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.control_plane import messages, rebuild
from benchmarks.control_plane.over_grpc import OverGrpc, Server
from benchmarks.control_plane.report import machine
from benchmarks.control_plane.sizes import FULL, QUICK
from control_plane.planning.config import CoreConfig
from control_plane.planning.core import ControlPlane
from data_plane.block_digests import BlockDigests
from data_plane.plans.tables.block_report import block_report
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.server.registration_stream import (
    BLOCKS_PER_REPORT,
    RegistrationStream,
    report_differences,
)
from kvplane.transport.tls import open_channel
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import control_pb2_grpc
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire.block_digests import RANGE_BLOCKS

_DEVICE = tpb.TIER_DEVICE
_SHARE = 0.01


class Plane:
    """What a data plane knows of its blocks, with the calls of an executor."""

    def __init__(self, num_blocks: int, parts: list[cpb.RegisterRequest]) -> None:
        self.num_blocks = num_blocks
        tables = BlockTables({_DEVICE: num_blocks, tpb.TIER_HOST: 0}, messages.BLOCK_SIZE_TOKENS)
        for part in parts:
            for blocks in part.report.blocks:
                numbers = np.frombuffer(blocks.indices, "<i4")
                tables.generations[_DEVICE][numbers] = np.frombuffer(blocks.generations, "<i8")
            for told in part.report.publications:
                tables.publications[0].keep(told, tables.generations[_DEVICE], "publications")
        self._tables = tables
        self.digests = BlockDigests(tables)
        self.hello = messages.hello(num_blocks, 0)

    def report(
        self, blocks_per_part: int, among: list[cpb.BlockRanges] | None = None
    ) -> list[cpb.BlockReport]:
        return block_report(self._tables, blocks_per_part, among)

    def allocate(self, blocks: list[int]) -> None:
        """Allocate these again: their publications are dropped."""
        chosen = np.array(sorted(blocks), np.int64)
        generations = self._tables.generations[_DEVICE][chosen] + 1
        self._tables.allocate(_DEVICE, chosen, generations)


def nothing(plane: Plane) -> None:
    """Equal."""


def some_ranges(plane: Plane) -> None:
    """A block in each of some ranges."""
    num_ranges = plane.num_blocks // RANGE_BLOCKS
    chosen = Random(1).sample(range(num_ranges), max(1, int(_SHARE * num_ranges)))
    plane.allocate([number * RANGE_BLOCKS for number in chosen])


def some_blocks(plane: Plane) -> None:
    """Blocks anywhere."""
    num = max(1, int(_SHARE * plane.num_blocks))
    plane.allocate(Random(1).sample(range(plane.num_blocks), num))


CASES: dict[str, Callable[[Plane], None] | None] = {
    "all": None,
    "equal": nothing,
    "1 % of the ranges": some_ranges,
    "1 % of the blocks": some_blocks,
}


@dataclass
class Figures:
    """``plane_s`` and ``longest_s``: see the module's docstring."""

    seconds: float = 0.0
    num_bytes: int = 0
    plane_s: float = 0.0
    longest_s: float = 0.0
    num_cached: int = 0


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


class Counted(RegistrationStream):
    """Counts the bytes that it sends."""

    num_bytes = 0

    async def send(self, request: cpb.RegisterRequest) -> None:
        self.num_bytes += request.ByteSize()
        await super().send(request)


class Threads:
    """In place of the executor's thread."""

    async def run(self, command: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(command)


@contextmanager
def held(path: Path) -> Iterator[Callable[[], None]]:
    """The election is this program's, until it gives it up."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


async def over_grpc(plane: Plane, change: Callable[[Plane], None] | None) -> Figures:
    """With a control plane in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, held(Path(folder) / "leader") as give_up:
        flags = ("--election", f"file:{folder}/leader")
        with Server(OverGrpc(is_gc_on=True), *flags) as server:
            async with open_channel(server.address, None) as channel:
                stub = control_pb2_grpc.ControlPlaneServiceStub(channel)
                if change is not None:
                    await _tell_ahead(stub, plane)
                    change(plane)
                give_up()
                while not await _answers(stub):
                    await asyncio.sleep(0.01)
                waits_s: list[float] = []
                probe = asyncio.create_task(rebuild.ask_again_and_again(stub, waits_s))
                figures = await _lead(stub, plane)
                probe.cancel()
                return replace(figures, longest_s=max(waits_s))


async def _answers(stub: Any) -> bool:
    try:
        await stub.DescribeControlPlane(cpb.DescribeControlPlaneRequest())
    except Exception:
        return False
    return True


async def _tell_ahead(stub: Any, plane: Plane) -> None:
    stream = RegistrationStream(stub.Register())
    hello = cpb.Hello()
    hello.CopyFrom(plane.hello)
    hello.is_ahead = True
    await stream.send(cpb.RegisterRequest(hello=hello))
    await stream.expect("welcome")
    for _ in range(2):
        await report_differences(stream, plane, Threads())  # type: ignore[arg-type]
    stream.cancel()


async def _lead(stub: Any, plane: Plane) -> Figures:
    began = time.perf_counter()
    stream = Counted(stub.Register())
    await stream.send(cpb.RegisterRequest(hello=plane.hello))
    if (await stream.expect("welcome")).welcome.compares:
        await report_differences(stream, plane, Threads())  # type: ignore[arg-type]
    else:
        for part in await asyncio.to_thread(plane.report, BLOCKS_PER_REPORT):
            await stream.send(cpb.RegisterRequest(report=part))
        await stream.expect("report_accepted")
    request = cpb.DescribePoolRequest(pool_id=plane.hello.pool_id)
    while not (described := await stub.DescribePool(request)).ready:
        await asyncio.sleep(0.002)
    seconds = time.perf_counter() - began
    stream.cancel()
    num_cached = described.usage.tiers[0].num_cached_blocks
    return Figures(seconds, stream.num_bytes, num_cached=num_cached)


async def measure(*, quick: bool, num_prompts: int) -> None:
    """All cases; a line for each."""
    sizes = replace(QUICK if quick else FULL)
    if num_prompts:
        sizes = replace(sizes, num_rebuilt_prompts=num_prompts)
    num_entries = sizes.num_rebuilt_prompts * sizes.prompt_blocks + 1
    num_blocks = num_entries + num_entries // 32
    parts = await rebuild.published(num_blocks, sizes)
    print(f"{num_entries:,} published blocks of {num_blocks:,}, ranges of {RANGE_BLOCKS}")
    print("                            seconds  plane's  MB sent  longest ms  restored")
    for name, change in CASES.items():
        plane = Plane(num_blocks, parts)
        here = InProcess(plane)
        if change is not None:
            here.tell_ahead()
            change(plane)
        _print("core", name, here.lead())
        figures = await over_grpc(Plane(num_blocks, parts), change)
        _print("grpc", name, figures)


def _print(world: str, name: str, of: Figures) -> None:
    plane = f"{of.plane_s:8.3f}" if of.plane_s else " " * 8
    print(
        f"{world} {name:<20} {of.seconds:9.3f} {plane} {of.num_bytes / 1e6:8.2f} "
        f"{1e3 * of.longest_s:11.1f} {of.num_cached:9,}",
        flush=True,
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few blocks, to see that it runs")
    parser.add_argument("--num-prompts", type=int, default=0, help="of 2,048 blocks each")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    asyncio.run(measure(quick=options.quick, num_prompts=options.num_prompts))


if __name__ == "__main__":
    main()
