"""Measures what share of the arithmetic units' limit attention over a prompt takes, and torch's.

    python -m benchmarks.attention_prefill [--isa ISA] [--tokens N] [--rounds N] [--threads N]
        [--json OUT]

A bare loop of fused products and sums in registers (``kvplane_kernels.fused_products``) is the
limit; the kernels' prefill of one prompt in bf16, and torch's, take turns with it. ``--isa``: the
kernels' instruction set, and with it the most that torch may use: otherwise torch would compute on
larger units (AVX-512, AMX) than the kernels that it is compared with. Figures are products a second
of CPU time, so that other programs disturb them less: of the fastest call, and of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import kvplane_kernels
import torch

from benchmarks.attention_cpu import rows
from benchmarks.attention_cpu.limits import products_of_prefill
from benchmarks.attention_cpu.report import machine
from benchmarks.attention_cpu.rows import prefill_rows
from data_plane.kernels.backends.cpu import cpu_isa

# The limits of torch's own kernels, oneDNN and MKL, by instruction set.
LIMITS: Final = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
}
VARIABLES: Final = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
BARE_ROUNDS: Final = 500_000
Side = tuple[str, Callable[[], float]]


def sides_of(num_tokens: int, num_threads: int) -> list[Side]:
    """Return the calls to time; each returns the number of products that it computed."""
    rows.KERNELS.num_threads = num_threads
    products = products_of_prefill(num_tokens)

    def counted(run: Callable[[], object]) -> Callable[[], float]:
        def call() -> float:
            run()
            return products

        return call

    def bare() -> float:
        return kvplane_kernels.fused_products(num_rounds=BARE_ROUNDS, num_threads=num_threads)

    ours, torchs = prefill_rows(num_tokens)
    return [("bare loop", bare), ("prefill", counted(ours.run)), ("torch", counted(torchs.run))]


def measure(sides: Sequence[Side], num_rounds: int) -> dict[str, list[float]]:
    """Return each call's products per second of CPU time; the first round does not count."""
    rates: dict[str, list[float]] = {name: [] for name, _ in sides}
    for round in range(1 + num_rounds):
        for name, call in sides:
            began_s = time.process_time()
            num_products = call()
            seconds = time.process_time() - began_s
            if round > 0:
                rates[name].append(num_products / seconds)
    return rates


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure prefill against a bare loop.")
    parser.add_argument("--isa", choices=sorted(LIMITS), help="of the kernels and of torch")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_prefill.json"))
    arguments = parser.parse_args(words)
    if cpu_isa() not in LIMITS:
        raise SystemExit(f"{cpu_isa()} has no fused products")
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    described = machine(arguments.threads, arguments.rounds)
    described |= {name: os.environ.get(name, "not set") for name in VARIABLES}
    rates = measure(sides_of(arguments.tokens, arguments.threads), arguments.rounds)
    print(", ".join(f"{name} {value}" for name, value in described.items()), end="\n\n")
    print("| 10^9 products a second of a core | fastest | median | of the bare loop |")
    print("|" + "---|" * 4)
    limit = max(rates["bare loop"])
    rows = []
    for name, of_calls in rates.items():
        best, median = max(of_calls), statistics.median(of_calls)
        print(f"| {name} | {best / 1e9:.1f} | {median / 1e9:.1f} | {best / limit:.0%} |")
        rows.append({"name": name, "best": round(best / 1e9, 2), "median": round(median / 1e9, 2)})
    times = max(rates["prefill"]) / max(rates["torch"])
    print(f"\nprefill / torch, fastest calls: {times:.2f}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=2) + "\n")
    print(f"saved to {arguments.json}")


def restarted(words: Sequence[str]) -> dict[str, str] | None:
    """Return the environment to start this program again with, because torch reads it when it is
    loaded; None if it already has the settings that ``--isa`` needs.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--isa", choices=sorted(LIMITS))
    isa = parser.parse_known_args(words)[0].isa
    wanted = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    if isa is not None:
        wanted |= dict(zip(VARIABLES, LIMITS[isa], strict=True)) | {"KVPLANE_KERNELS_ISA": isa}
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return None
    return dict(os.environ) | wanted


if __name__ == "__main__":
    environment = restarted(sys.argv[1:])
    if environment is not None:
        command = [sys.executable, "-m", "benchmarks.attention_prefill", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    main()
