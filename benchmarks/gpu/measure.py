"""Measures the CUDA kernels on this machine's GPU, its bandwidth, and the installed peers.

    python -m benchmarks.gpu.measure [--quick | --tiny | --survey] [--seconds S] [--out FOLDER]

Needs a GPU and a build of csrc with KVPLANE_CUDA=ON, as benchmarks/gpu/run.sh makes it. GB/s count
each byte that has to be moved once: the keys and values of the contexts for decode, reads and
writes of a copy, what crosses the link for a swap. Contexts are in blocks in random order. Each
result is checked before it is timed. Prints the estimates for this GPU, by the copy bandwidth that
it has just measured, and a line for each row; saves rows as they come, and prints the targets last,
also when it is interrupted. The exit code is 1 when a result was wrong, 2 when there is no GPU to
use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu import estimate
from benchmarks.gpu.cases import shapes
from benchmarks.gpu.cases.attention import estimated_seconds, measure_attention
from benchmarks.gpu.cases.bandwidth import measure_bandwidths
from benchmarks.gpu.cases.copies import measure_copies
from benchmarks.gpu.device.machine import Machine, NoGpuError, this_gpu
from benchmarks.gpu.device.timing import Once, Stopwatch
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.verdict import case_of, same_case, say, verdicts

SECONDS = 280.0
TINY_BYTES = 1 << 20


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.measure", description="Measure the CUDA kernels."
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few shapes, few runs")
    size.add_argument(
        "--tiny",
        action="store_true",
        help="run each operation once on a few tokens, to check results; saves nothing",
    )
    size.add_argument(
        "--survey", action="store_true", help="six shapes with each split; saves nothing"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="start nothing after this (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(words)


def measure_tiny(machine: Machine) -> Measurement:
    """Everything but the peers, once, on a few tokens."""
    m = Measurement(machine, SECONDS)
    measure_bandwidths(m)
    measure_copies(m, tiny=True)
    tiny = (*shapes.TINY_DECODES, *shapes.TINY_APPENDS, *shapes.TINY_SHARED)
    measure_attention(m, tiny, with_peers=False)
    return m


def measure_survey(machine: Machine) -> Measurement:
    """Time six shapes with each split: a replayed graph, kernels by the profiler, and the host."""
    m = Measurement(machine, SECONDS)
    measure_attention(m, shapes.SURVEY, with_peers=False, all_splits=True)
    for shape in shapes.SURVEY:
        case = {"name": "decode" if shape.new == 1 else "append", **shape.named()}
        times = (
            f"{row['split']}: {row['us']:.4g} ({row.get('kernels_us', '-')}, {row['host_us']})"
            for row in m.rows
            if same_case(row, case)
        )
        print(f"survey: {shape.new} of {case_of(case)}, split: µs (in kernels, of the host): ")
        print(f"survey:   {'; '.join(times)}")
    return m


def measure_all(m: Measurement, watch: Stopwatch, quick: bool, seconds: float) -> None:
    """Measure everything, the most important first, in case the time runs out."""
    decodes, appends = shapes.DECODES, shapes.APPENDS
    if quick:
        decodes, appends = shapes.QUICK_DECODES, shapes.QUICK_APPENDS
    everything = (*decodes, *appends, *shapes.SHARED)
    expected = estimated_seconds(everything, watch.budget_s, watch.min_runs)
    num_shapes = len(everything)
    print(f"{num_shapes} shapes, about {expected:.0f} s, {seconds:.0f} s at most", flush=True)
    measure_bandwidths(m)
    print(f"bandwidths: {m.elapsed_s:.0f} s", flush=True)
    say_estimates(m)
    measure_copies(m)
    print(f"copies: {m.elapsed_s:.0f} s", flush=True)
    held, others = shapes.by_target(decodes)
    for some in (held, shapes.SHARED, appends, others):
        measure_attention(m, some)
    print(f"attention: {m.elapsed_s:.0f} s", flush=True)


def say_estimates(m: Measurement) -> None:
    """Print the model's estimates for this device, by the copy bandwidth just measured."""
    copy, count = m.copy_gb_s, m.machine.num_multiprocessors
    if copy is None:
        print("estimate: none, as no copy bandwidth was measured", flush=True)
        return
    print(f"estimate: by {copy:.0f} GB/s of copies and {count} multiprocessors, as measured here")
    for line in estimate.lines(copy, count):
        print(f"estimate: {line}", flush=True)


def main(
    words: Sequence[str] | None = None, machine_of: Callable[[Once | Stopwatch], Machine] = this_gpu
) -> int:
    """Measure, save ``<GPU>-<date>.json``, and print which targets are met."""
    arguments = arguments_of(words)
    try:
        if arguments.tiny:
            machine = machine_of(Once())
            machine.large_bytes = TINY_BYTES
            m = measure_tiny(machine)
        elif arguments.survey:
            m = measure_survey(machine_of(Stopwatch(3, 10, 0.02)))
        else:
            watch = Stopwatch(3, 5, 0.02) if arguments.quick else Stopwatch()
            m = Measurement(machine_of(watch), arguments.seconds, folder=arguments.out)
            try:
                measure_all(m, watch, arguments.quick, arguments.seconds)
            except KeyboardInterrupt:
                print("interrupted")
    except NoGpuError as error:
        print(f"benchmarks.gpu.measure: {error}")
        return 2
    if not arguments.tiny and not arguments.survey:
        print(f"saved to {m.save(arguments.out)}")
        print(say(verdicts(m.result())))
    print(f"wrong results: {len(m.wrong)}; left out: {len(m.left_out)}")
    return 1 if m.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
