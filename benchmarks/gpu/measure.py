"""What the CUDA kernels do on this machine's GPU, beside its own bandwidth and what is installed.

    python -m benchmarks.gpu.measure [--quick | --tiny] [--seconds S] [--out FOLDER]

Needs a GPU and a build of csrc with KVPLANE_CUDA=ON; benchmarks/gpu/run.sh makes one. GB/s count
each byte that has to be moved once: keys and values of the contexts for decode, both sides of a
copy, what goes over the link of a swap. Contexts lie in blocks in random order. What is timed is
compared with a right answer first. A line is printed for each row, all rows are saved, and what is
to hold is printed last. The exit code is 1 when an answer was wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu import shapes
from benchmarks.gpu.attention import estimated_seconds, measure_attention
from benchmarks.gpu.bandwidth import measure_bandwidths
from benchmarks.gpu.copies import measure_copies
from benchmarks.gpu.machine import Machine, NoGpuError, this_gpu
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.timing import Once, Stopwatch
from benchmarks.gpu.verdict import say, verdicts

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
        help="each operation once on a few tokens, to see that it is right: nothing is saved",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="begin nothing later than this (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(words)


def measure_tiny(machine: Machine) -> Measurement:
    """Everything but the peers, once, on a few tokens."""
    m = Measurement(machine, SECONDS)
    measure_bandwidths(m)
    measure_copies(m, tiny=True)
    measure_attention(m, (*shapes.TINY_DECODES, *shapes.TINY_APPENDS), with_peers=False)
    return m


def measure_all(machine: Machine, watch: Stopwatch, quick: bool, seconds: float) -> Measurement:
    """In the order of what matters, for the case that time runs out."""
    decodes, appends = shapes.DECODES, shapes.APPENDS
    if quick:
        decodes, appends = shapes.QUICK_DECODES, shapes.QUICK_APPENDS
    expected = estimated_seconds((*decodes, *appends), watch.budget_s, watch.min_runs)
    num_shapes = len(decodes) + len(appends)
    print(f"{num_shapes} shapes, about {expected:.0f} s, {seconds:.0f} s at most", flush=True)
    m = Measurement(machine, seconds)
    measure_bandwidths(m)
    print(f"bandwidths: {m.elapsed_s:.0f} s", flush=True)
    measure_copies(m)
    print(f"copies: {m.elapsed_s:.0f} s", flush=True)
    held, others = shapes.by_target(decodes)
    for some in (held, appends, others):
        measure_attention(m, some)
    print(f"attention: {m.elapsed_s:.0f} s", flush=True)
    return m


def save(m: Measurement, folder: Path) -> Path:
    result = m.result()
    folder.mkdir(parents=True, exist_ok=True)
    gpu = str(result["machine"]["gpu"]).lower().replace(" ", "-")
    path = folder / f"{gpu}-{result['machine']['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def main(
    words: Sequence[str] | None = None, machine_of: Callable[[Once | Stopwatch], Machine] = this_gpu
) -> int:
    """Measures, saves ``<GPU>-<date>.json``, and says what holds."""
    arguments = arguments_of(words)
    try:
        if arguments.tiny:
            machine = machine_of(Once())
            machine.large_bytes = TINY_BYTES
            m = measure_tiny(machine)
        else:
            watch = Stopwatch(3, 5, 0.02) if arguments.quick else Stopwatch()
            m = measure_all(machine_of(watch), watch, arguments.quick, arguments.seconds)
    except NoGpuError as error:
        print(f"benchmarks.gpu.measure: {error}")
        return 2
    if not arguments.tiny:
        print(f"saved to {save(m, arguments.out)}")
        print(say(verdicts(m.result())))
    print(f"wrong answers: {len(m.wrong)}; left out: {len(m.left_out)}")
    return 1 if m.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
