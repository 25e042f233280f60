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
from dataclasses import replace

from benchmarks.control_plane import rebuild
from benchmarks.control_plane.report import machine
from benchmarks.control_plane.sizes import FULL, QUICK
from benchmarks.reports_ahead.in_process import InProcess
from benchmarks.reports_ahead.over_grpc import over_grpc
from benchmarks.reports_ahead.plane import CASES, Figures, Plane
from kvplane.wire.block_digests import RANGE_BLOCKS


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
