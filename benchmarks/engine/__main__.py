"""Measures the engine against transformers' own ways to generate, in one run, and compares tokens.

    python -m benchmarks.engine [--models 31m,197m] [--batches 1,8,32] [--threads 2,4] [--runs 3]
                                [--sides generate,generate_batch,embedded,remote]
                                [--linears packed] [--quick] [--json OUT]

Sides: ``generate``, transformers' padded batch; ``generate_batch``, its continuous batching;
``plane_cache``, generate on a PlaneCache; ``embedded``, the engine with a data plane in this
process; ``remote``, the engine with one beside it. All compute in this process with the same linear
layers, and take turns: every run has new prompts, which each side answers before the next run.
Models are random and made for this, in float32. ``service``: the share of an embedded decode step
that is neither the model's own work nor the kernels that write and attend. Each number of threads
is measured in a process of its own, because torch is told how its threads wait when it starts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.threads import tune_torch, waiting


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
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    given = parser.parse_args(argv)
    numbers = [int(number) for number in given.threads.split(",")]
    if len(numbers) > 1:
        run_each(numbers, argv, given.json)
        return
    given.threads = numbers[0]
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    tune_torch(given.threads)
    run(given)


def run_each(numbers: Sequence[int], argv: Sequence[str], out: Path | None) -> None:
    """Measure with each number of threads, one process after the other; their JSON as one."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in numbers:
            file = Path(scratch) / f"{number}.json"
            own = ["--threads", str(number), "--json", str(file)]
            subprocess.run([sys.executable, "-m", "benchmarks.engine", *argv, *own], check=True)
            found.append(json.loads(file.read_text()))
    if out is not None:
        rows = [row for figures in found for row in figures["rows"]]
        out.write_text(json.dumps({**found[0], "rows": rows}, indent=1) + "\n")


def run(given: argparse.Namespace) -> None:
    """Measure, print as it goes, write the JSON. Torch is imported here, once it is tuned."""
    import torch

    from benchmarks.engine.measure import as_json, measure, print_row, workloads
    from benchmarks.engine.sides import make_model, sides

    torch.set_num_threads(given.threads)
    num_cpus = len(os.sched_getaffinity(0))
    print(f"{given.threads} threads, {waiting()}, {given.linears} linear layers")
    if given.threads > num_cpus:
        print(f"more threads than the {num_cpus} processors of this machine: they take turns")
    batches = [int(batch) for batch in given.batches.split(",")]
    chosen = given.sides.split(",")
    rows = []
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_model(model, Path(scratch))
            with sides(folder, chosen, given.threads, given.linears) as (of, times):
                print(f"{'tokens/s':28}" + "".join(f"{name:>15}" for name in of))
                for number, workload in enumerate(
                    workloads(model, batches, 8 if given.quick else 1)
                ):
                    row = measure(model, workload, of, times, given.runs, 1000 * number)
                    print_row(row)
                    rows.append(row)
    if given.json is not None:
        figures = as_json(rows, given.threads, given.linears)
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
