"""Measures the CPU kernels against the speed of memory and against torch's attention, in one run.

    python -m benchmarks.attention_cpu [--quick] [--runs N] [--threads N] [--json OUT]

All measurements take turns in rounds, so that noise from elsewhere affects them alike: compare rows
of one run, not of two. ``--runs``: the number of passes over all rounds; each row's figure is the
median of the passes' medians. Before every call, torch's included, other memory is read so that no
cache holds the call's data. Torch's threads sleep between its calls (OMP_WAIT_POLICY=PASSIVE,
unless the environment says otherwise), and freed memory stays with the process: otherwise a call of
some milliseconds could take twice as long because the allocator returns the memory of earlier calls
in it. A decode is a step of four layers. ``GB/s`` count each byte once: the keys and values that
decode reads, and the bytes that a copy copies, not both its read and its write. ``read_bandwidth``
and ``read_pages`` read and do nothing else, on the kernels' own threads: memory in order, and pages
in the order of decode, which is the limit of any kernel over them; ``fused_products`` multiplies
and adds in registers. The last table has the shares of these limits (limits.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.attention_cpu.limits import bare_rows, limits
from benchmarks.attention_cpu.report import as_json, machine
from benchmarks.attention_cpu.rows import (
    DTYPES,
    QUICK,
    Sizes,
    block_rows,
    decode_rows,
    prefill_rows,
)
from benchmarks.attention_cpu.tables import tables
from benchmarks.common.calls import Calls, call_in_rounds
from benchmarks.common.memory import Memory, cold_caches
from data_plane.kernels.backends.cpu import cpu_isa


def measure(sizes: Sizes, *, num_threads: int, num_passes: int) -> list[Calls]:
    """Measure all rows by turns."""
    memory = Memory(sizes.memory_bytes, num_threads)
    rows = [memory.read_calls(), memory.copy_calls()]
    for name, dtype in DTYPES.items():
        rows += decode_rows(name, dtype, sizes.context_tokens)
    rows += block_rows(sizes.num_blocks)
    rows += prefill_rows(sizes.prefill_tokens) + bare_rows(num_threads)
    empty = cold_caches(num_threads)
    call_in_rounds(rows, empty, num_passes=num_passes, num_rounds=sizes.num_rounds)
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the CPU kernels.")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, few rounds")
    parser.add_argument("--runs", type=int, default=1, help="passes over all of it")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_cpu.json"))
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    described = machine(arguments.threads, arguments.runs)
    sizes = QUICK if arguments.quick else Sizes()
    rows = measure(sizes, num_threads=arguments.threads, num_passes=arguments.runs)
    print(", ".join(f"{name} {value}" for name, value in described.items()), end="\n\n")
    print(tables(rows, cpu_isa()), end="\n\n")
    print(*limits(rows), sep="\n", end="\n\n")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(as_json(rows, described), indent=2) + "\n")
    print(f"saved to {arguments.json}")


def restart_quietly() -> None:
    """Restart this program with settings that are read when it starts, or when torch is loaded:
    idle threads of torch sleep, as otherwise they would spin after a call, on the cores that the
    next call needs; and freed memory stays with the process.
    """
    settings = {
        "OMP_WAIT_POLICY": "PASSIVE",
        # glibc keeps freed memory, and takes allocations below 32 MiB from the heap.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    }
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    if missing:
        os.environ.update(missing)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.attention_cpu", *sys.argv[1:]])


if __name__ == "__main__":
    restart_quietly()
    main()
