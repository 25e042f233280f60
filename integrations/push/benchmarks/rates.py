"""The flags, table and JSON that all measurements of moved blocks share."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import machine, said, save

from .planes import BLOCK_BYTES

Rates = dict[str, list[float]]
"""GB/s of each round, by way."""


def report_rates(
    description: str | None,
    measure: Callable[[Path, int, int], Rates],
    last_column: str,
    cell: Callable[[Rates, float], str],
    *,
    num_rounds: int,
) -> None:
    """Measure, print the table, write the JSON. ``measure`` gets an empty folder and the numbers of
    blocks and rounds. ``cell`` makes the last column from all rates and a way's median.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mebibytes", type=int, default=64, help="of blocks")
    parser.add_argument("--rounds", type=int, default=num_rounds)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    num_blocks = max(1, options.mebibytes * 1024 * 1024 // BLOCK_BYTES)
    described = machine()
    print(f"{said(described)}; {num_blocks * BLOCK_BYTES / 2**20:.0f} MiB, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), num_blocks, options.rounds)
    print(f"{'way':<12} {'median GB/s':>12} {'best':>6} {last_column:>11}")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:<12} {median:>12.2f} {max(values):>6.2f} {cell(rates, median):>11}")
    num_bytes = num_blocks * BLOCK_BYTES
    save(options.json, {"machine": described, "num_bytes": num_bytes, "gb_per_s": rates})
