"""Measures the CPU kernels: against the speed of memory, torch's attention, and each other.

    python -m benchmarks.attention_cpu [PART] [--quick] [--rounds N] [--runs N]
                                       [--threads N] [--json OUT]

    kernels   every kernel against the speed of memory and torch's attention (default)
    shared    decode over a common prefix, against decode that does not share reads or blocks
    sparse    attention over fewer and fewer blocks, against attention over all of them

All measurements of a part take turns in rounds, so that noise from elsewhere affects them alike:
compare rows of one run, not of two. ``--runs``: the number of passes over all rounds; the figures
of ``kernels`` are the medians of the passes' medians. Before every call, torch's included, other
memory is read so that no cache holds the call's data.

A decode of ``kernels`` is a step of four layers. ``GB/s`` count each byte once: the keys and values
that decode reads, and the bytes that a copy copies, not both its read and its write.
``read_bandwidth`` reads memory in order and does nothing else, on the kernels' own threads;
``fused_products`` multiplies and adds in registers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.attention_cpu import kernels, parts
from benchmarks.attention_cpu.kernels import QUICK, Sizes, kernel_rows
from benchmarks.common.memory import cold_caches
from benchmarks.common.report import machine, said, save
from benchmarks.common.timing import Calls, call_in_rounds
from data_plane.kernels.backends.cpu import cpu_isa

# Torch's threads sleep between its calls, where they would spin on the cores that the next call
# needs. glibc keeps freed memory, and takes allocations below 32 MiB from the heap: else a call of
# some milliseconds could take twice as long because it returns the memory of earlier ones.
SETTINGS: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_cpu")
    parser.add_argument("part", nargs="?", default="kernels", choices=("kernels", *parts.PARTS))
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=1, help="passes over all rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    given = parse(words)
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    sizes, empty = QUICK if given.quick else Sizes(), cold_caches(given.threads)
    described = machine(threads=given.threads, isa=cpu_isa(), torch=torch.__version__)
    print(said(described), end="\n\n", flush=True)
    times = {"num_passes": given.runs, "num_rounds": given.rounds}
    groups: list[list[Calls]] = []
    if given.part == "kernels":
        groups.append(kernel_rows(sizes, given.threads))
        call_in_rounds(groups[0], empty, **times)
        print(*kernels.table(groups[0], cpu_isa()), sep="\n")
    else:
        for group in parts.PARTS[given.part](sizes, given.threads):
            call_in_rounds(group, empty, **times)
            groups.append(group)
        print(*parts.table(groups), sep="\n")
    rows = [
        {"name": row.name, "unit": row.unit, "amount": row.amount, "p50": row.rate()}
        | {"seconds": row.seconds, "least_cpu_s": row.least_cpu_s}
        for group in groups
        for row in group
    ]
    save(given.json, {"machine": described, "part": given.part, "rows": rows})


if __name__ == "__main__":
    # They are read when the program starts.
    wanted = {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", "benchmarks.attention_cpu", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | wanted)
    main()
