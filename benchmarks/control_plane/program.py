"""Measures the control plane: its core in this process, and over gRPC as a process of its own.

    python -m benchmarks.control_plane [--quick] [--only PATTERN] [--rounds N] [--json OUT]

``core/CASE``: packed request bytes in, parsed, planned, and the signed plan encoded into the
answer's bytes; all of that is timed. ``grpc/CASE``: a Step on a stream, from the request message to
the parsed answer, with the server in another process. Receipts are signed and verified. No two
steps have the same content, so nothing is memoised. The data plane is simulated. The clients run as
our engines do: on uvloop, and without gRPC's EventEngine unless GRPC_EXPERIMENTS says otherwise.

``--rounds`` measures all cases that often, by turns, for machines that others share. Each row shows
the round with the best median, and the median of all rounds' medians.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.common.report import machine, said, save
from benchmarks.common.timing import drop_leftovers
from benchmarks.control_plane import memory, prompts, rates, rebuild, slices
from benchmarks.control_plane.engine import World
from benchmarks.control_plane.in_process import InProcess
from benchmarks.control_plane.over_grpc import OverGrpc
from benchmarks.control_plane.report import Row, as_json, best_of, table
from benchmarks.control_plane.sizes import FULL, QUICK, Sizes

BOTH: Final = ("core", "grpc")
CORE: Final = ("core",)
GRPC: Final = ("grpc",)


@dataclass(frozen=True)
class Case:
    """One measurement, which may give several rows. ``worlds``: where it is measured."""

    name: str
    measure: Callable[[World, Sizes], Awaitable[list[Row]]]
    worlds: tuple[str, ...] = BOTH


CASES: Final = (
    Case("hit_in_use_32k", prompts.hit_in_use_32k),
    Case("miss_32k", prompts.miss_32k),
    Case("hit_free_32k_pool100k", prompts.hit_free_32k_pool100k),
    Case("empty_step", prompts.empty_step),
    Case("decode_step_256", prompts.decode_step_256),
    Case("swap_2048_blocks", prompts.swap_2048_blocks),
    Case("abort_256x2048", prompts.abort_256x2048),
    *(
        Case(rates.rate_name(num), partial(rates.steps_per_s, num_engines=num))
        for num in (1, 8, 64)
    ),
    Case("decode_beside_32k_admissions", rates.decode_beside_32k_admissions, GRPC),
    Case("rebuild_1M_blocks", rebuild.rebuild_1m_blocks),
    Case("memory", memory.memory, CORE),
    Case("slices", slices.slices, CORE),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the control plane.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--only", default="", help="a regular expression: of core/CASE, grpc/CASE")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is measured")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/control_plane.json"))
    arguments = parser.parse_args()
    described = machine()
    rounds = []
    for _ in range(max(1, arguments.rounds)):
        rows = uvloop.run(measure(arguments.only, quick=arguments.quick))
        rounds.append(rows)
    rows = best_of(rounds)
    if not rows:
        parser.error(f"--only {arguments.only}: no case has such a name")
    print(said(described))
    print(*table(rows), sep="\n")
    save(
        arguments.json,
        {"machine": described, "quick": arguments.quick, "rows": [*map(as_json, rows)]},
    )
    print(f"saved to {arguments.json}")


async def measure(only: str, *, quick: bool) -> list[Row]:
    """Measure the cases whose names ``only`` matches. Return their rows."""
    rows: list[Row] = []
    sizes = QUICK if quick else FULL
    for world in (InProcess(), OverGrpc()):
        for case in CASES:
            name = f"{world.name}/{case.name}"
            if world.name not in case.worlds or not re.search(only, name):
                continue
            print(name, flush=True)
            drop_leftovers()
            of_case = await case.measure(world, sizes)
            rows += [replace(row, name=f"{world.name}/{row.name}") for row in of_case]
    return rows
