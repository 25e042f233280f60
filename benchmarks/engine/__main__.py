"""Measures the engine against transformers and vLLM, in one run, and compares tokens.

    python -m benchmarks.engine [--models 31m,197m] [--batches 1,8,32] [--threads 2] [--runs 3]
                                [--sides generate,embedded,compiled,vllm,remote] [--quick]
                                [--prompt-tokens 256] [--new-tokens 64] [--json OUT]

Sides: ``generate``, transformers' padded batch; ``embedded``, the engine with a data plane in this
process; ``compiled``, the same with compiled steps; ``remote``, the engine with a data plane beside
it; ``vllm``, as its users have it on a CPU, in a process and an environment of its own, into which
it is installed first. All but vLLM have packed linear layers. They take turns: every run has new
prompts, which each side answers before the next run, and the time is that of prompts and new
tokens. Models are random, in float32. Torch reads how its threads wait when it starts: here as for
an engine with a remote data plane if ``remote`` is among the sides, else as for an embedded one.
Each row is printed, and written to OUT, as soon as it is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.threads import tune_torch, waiting
from kvplane.serving.event_loop import tune_grpc
from kvplane.sync.short_thread import call_in_short_thread


def main(argv: Sequence[str]) -> None:
    """Read the flags, measure, print and write row by row."""
    parser = argparse.ArgumentParser(description="Measure the engine against others.")
    parser.add_argument("--models", default="31m,197m", help="of tiny, 31m, 197m")
    parser.add_argument("--batches", default="1,8,32", help="sizes of batches")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload")
    parser.add_argument("--sides", default="generate,embedded,remote", help="in their order")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="0: 5 to 16")
    parser.add_argument("--new-tokens", type=int, default=0, help="0: 48, or 24 of the largest")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--json", type=Path, help="file to write the figures to, row by row")
    given = parser.parse_args(argv)
    chosen = given.sides.split(",")
    tune_torch(given.threads, is_embedded="remote" not in chosen)
    tune_grpc()  # as the planes' programs and the engine's do
    import torch  # once it is tuned

    from benchmarks.common.report import machine, save
    from benchmarks.engine.measure import as_json, measure, print_row, workloads
    from benchmarks.engine.sides import make_model, sides

    torch.set_num_threads(given.threads)
    num_cpus = len(os.sched_getaffinity(0))
    print(f"{given.threads} threads, {waiting()}", flush=True)
    if given.threads > num_cpus:
        print(f"more threads than the {num_cpus} processors of this machine: they take turns")
    described = machine(usable_cpus=num_cpus, torch=torch.__version__, threads=given.threads)
    rows = []
    batches = [int(batch) for batch in given.batches.split(",")]
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = call_in_short_thread(partial(make_model, model, Path(scratch)))
            with sides(folder, chosen, given.threads) as of:
                print(f"{'tokens/s':28}" + "".join(f"{name:>15}" for name in of))
                lengths = given.prompt_tokens, given.new_tokens
                of_model = workloads(model, batches, 8 if given.quick else 1, *lengths)
                for number, workload in enumerate(of_model):
                    row = measure(model, workload, of, given.runs, 1000 * number)
                    print_row(row)
                    rows.append(as_json(row))
                    save(given.json, {"machine": described, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
