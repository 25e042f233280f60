"""Measures the engine against transformers' own ways to generate, in one run, and compares tokens.

    python -m benchmarks.engine [--models 31m,197m] [--batches 1,8,32] [--threads 2,4] [--runs 3]
                                [--sides generate,generate_batch,embedded,remote]
                                [--linears packed] [--quick] [--json OUT [--append]]

Sides: ``generate``, transformers' padded batch; ``generate_batch``, its continuous batching;
``plane_cache``, generate on a PlaneCache; ``embedded``, the engine with a data plane in this
process; ``remote``, the engine with one beside it. All compute in this process with the same linear
layers, and take turns: every run has new prompts, which each side answers before the next run.
Models are random, in float32. ``service``: the share of an embedded decode step that is neither the
model's own work nor the kernels that write and attend. Each number of threads is measured in a
process of its own, because torch reads how its threads wait when it starts: as for an engine with a
remote data plane if ``remote`` is among the sides, else as for an embedded one.
Each row is printed, and written to OUT, as soon as it is measured.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.threads import tune_torch, waiting
from kvplane.serving.event_loop import tune_grpc
from kvplane.sync.short_thread import call_in_short_thread


def main(argv: Sequence[str]) -> None:
    """Read the flags, and run."""
    parser = argparse.ArgumentParser(description="Measure the engine against transformers.")
    parser.add_argument("--models", default="31m,197m", help="of tiny, 31m, 197m")
    parser.add_argument("--batches", default="1,8,32", help="sizes of batches")
    parser.add_argument("--threads", default="2", help="numbers of threads that compute")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload")
    parser.add_argument(
        "--sides", default="generate,generate_batch,embedded,remote", help="in their order"
    )
    parser.add_argument("--linears", default="packed", choices=("packed", "torch"))
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--json", type=Path, help="file to write the figures to, row by row")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    given = parser.parse_args(argv)
    numbers = [int(number) for number in given.threads.split(",")]
    if len(numbers) > 1:
        run_each(numbers, argv)
        return
    given.threads = numbers[0]
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    tune_torch(given.threads, is_embedded="remote" not in given.sides.split(","))
    tune_grpc()  # as the planes' programs and the engine's do
    run(given)


def run_each(numbers: Sequence[int], argv: Sequence[str]) -> None:
    """Measure with each number of threads, in one process after the other, into one JSON file."""
    for place, number in enumerate(numbers):
        own = ["--threads", str(number), *(["--append"] if place else [])]
        subprocess.run([sys.executable, "-m", "benchmarks.engine", *argv, *own], check=True)


def run(given: argparse.Namespace) -> None:
    """Measure, print and write row by row. Torch is imported here, once it is tuned."""
    import torch

    from benchmarks.engine.measure import Rows, measure, print_row, workloads
    from benchmarks.engine.sides import make_model, sides

    torch.set_num_threads(given.threads)
    num_cpus = len(os.sched_getaffinity(0))
    print(f"{given.threads} threads, {waiting()}, {given.linears} linear layers", flush=True)
    if given.threads > num_cpus:
        print(f"more threads than the {num_cpus} processors of this machine: they take turns")
    batches = [int(batch) for batch in given.batches.split(",")]
    chosen = given.sides.split(",")
    rows = Rows(given.json, given.threads, given.linears, appends=given.append)
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = call_in_short_thread(partial(make_model, model, Path(scratch)))
            with sides(folder, chosen, given.threads, given.linears) as (of, times):
                print(f"{'tokens/s':28}" + "".join(f"{name:>15}" for name in of))
                for number, workload in enumerate(
                    workloads(model, batches, 8 if given.quick else 1)
                ):
                    row = measure(model, workload, of, times, given.runs, 1000 * number)
                    print_row(row)
                    rows.add(row)


if __name__ == "__main__":
    main(sys.argv[1:])
