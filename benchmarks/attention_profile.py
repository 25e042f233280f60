"""Measures what limits decode on the CPU: memory bandwidth, arithmetic, or memory latency.

    python -m benchmarks.attention_profile [--quick] [--runs N] [--threads N] [--json OUT]

The batch of ``benchmarks.attention_cpu`` is measured with its pages in three places: in the cache
(all tables have the same few blocks, so only arithmetic limits it), in memory in order, and in
memory in random order; and beside it the speed of reading memory. Before each call whose pages are
to be in memory, other memory is read until no cache holds them; this is not timed. All of it runs
with one thread and with all threads. A row that reaches neither limit waits for memory latency.

Rates count unique bytes (in the cache: bytes read) and are per core: of the median call, per second
of CPU time, so that the time of other programs does not count. With ``--runs`` it is the median of
the passes' medians, with the lowest and the highest beside it. If other programs keep threads from
running at the same time, the threads do not share the memory's speed either. The rate of two
threads together needs an otherwise idle machine; ``clock`` (wall time) shows it. Only rows of one
run can be compared.

``by row`` estimates the share of a call that does not depend on the head size: softmax, sums over
lanes, finding pages. The times of head sizes 64 and 128, both in the cache, are extrapolated
linearly to a head size of 0.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.attention_cpu.report import machine
from benchmarks.attention_cpu.rows import (
    BATCH,
    BLOCK_SIZE,
    DTYPES,
    GROUPS,
    HEAD_SIZE,
    NUM_KV_HEADS,
    Sizes,
    query_dtype_of,
    random_pool,
)
from benchmarks.common.calls import Calls, Spread, call_in_rounds
from benchmarks.common.memory import Memory, cold_caches
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels

CACHE_BYTES = 256 << 10  # fits in any core's cache, and is far more than one tile
HALF_SIZE = HEAD_SIZE // 2
QUICK = Sizes(context_tokens=1024, memory_bytes=64 << 20, num_rounds=2)
FULL = Sizes(num_rounds=11)
PLACES = ("cache", "in order", "random")


def attend(
    pages: torch.Tensor, tables: torch.Tensor, group: int, num_threads: int, *, is_warm: bool
) -> Calls:
    """Return a call with one query token for each row of the tables."""
    batch, context_tokens = tables.shape[0], tables.shape[1] * BLOCK_SIZE
    shape = (batch, NUM_KV_HEADS * group, pages.shape[-1])
    query = torch.randn(shape).to(query_dtype_of(pages.dtype))
    starts, lens = torch.arange(batch + 1), torch.full((batch,), context_tokens)
    num_bytes = tables.numel() * pages[0].nbytes
    kernels = CpuKernels(num_threads)

    def run() -> object:
        return kernels.paged_attention(AttentionArguments(query, pages, tables, starts, lens))

    return Calls("", "GB/s", num_bytes, run, is_warm)


@dataclass
class Decode:
    """A decode of one dtype, head group and number of threads, with its pages in each place."""

    name: str
    group: int
    num_threads: int
    element_bytes: int
    places: dict[str, Calls]
    half_size: Calls  # in the cache

    @classmethod
    def all_of(cls, name: str, dtype: torch.dtype, tokens: int, threads: list[int]) -> list[Decode]:
        """Return every group, on the same pages."""
        num_blocks = BATCH * tokens // BLOCK_SIZE
        pages = random_pool(num_blocks, dtype)[:, 0]
        num_cached = CACHE_BYTES // pages[0].nbytes
        half = random_pool(2 * num_cached, dtype, HALF_SIZE)[:, 0]
        shape = (BATCH, num_blocks // BATCH)
        tables = {
            "cache": torch.randint(num_cached, shape),
            "in order": torch.arange(num_blocks).view(shape),
            "random": torch.randperm(num_blocks).view(shape),
        }
        halved = torch.randint(half.shape[0], shape)
        return [
            cls(
                name,
                group,
                count,
                dtype.itemsize,
                {
                    place: attend(pages, tables[place], group, count, is_warm=place == "cache")
                    for place in PLACES
                },
                attend(half, halved, group, count, is_warm=True),
            )
            for group in GROUPS
            for count in threads
        ]

    @property
    def rows(self) -> list[Calls]:
        return [*self.places.values(), self.half_size]

    @property
    def flop_per_byte(self) -> float:
        """Operations per byte of KV: a product and a sum for each element and query head."""
        return 2 * self.group / self.element_bytes

    def rate(self, place: str) -> float:
        """Return GB/s per second of CPU time."""
        return self.places[place].rate_of_core().middle

    @property
    def share_by_row(self) -> float:
        """The share of the time in the cache that does not depend on the head size."""
        half = self.half_size.amount / self.half_size.rate_of_core().middle
        whole = self.places["cache"].amount / self.rate("cache")
        return max(0.0, (2 * half - whole) / whole)

    def as_json(self, read: float) -> dict[str, object]:
        """Return the figures. ``read``: GB/s at which one core reads memory."""
        return {
            "name": f"decode/{self.name}/g{self.group}",
            "threads": self.num_threads,
            "unit": "GB/s a core",
            "flop_per_byte": self.flop_per_byte,
            "read": round(read, 2),
            **{place.replace(" ", "_"): round(self.rate(place), 2) for place in PLACES},
            "random_lowest": round(self.places["random"].rate_of_core().lowest, 2),
            "random_highest": round(self.places["random"].rate_of_core().highest, 2),
            "gflops_cache": round(self.rate("cache") * self.flop_per_byte, 1),
            "share_by_row": round(self.share_by_row, 3),
            "limit": self.limit(read),
            "random_by_the_clock": round(self.places["random"].rate().middle, 2),
            "of_limit": round(self.of_limit(read), 3),
        }

    def limit(self, read: float) -> str:
        """Return the lower of the two limits."""
        return "memory" if read < self.rate("cache") else "arithmetic"

    def of_limit(self, read: float) -> float:
        """Return the share of the lower limit that random pages reach."""
        return self.rate("random") / min(read, self.rate("cache"))


def measure(
    sizes: Sizes, *, threads: list[int], num_passes: int
) -> tuple[list[Decode], dict[int, Calls]]:
    """Measure all rows by turns. Return them, and the speed of reading memory by threads."""
    reads = {n: Memory(sizes.memory_bytes, n).read_calls() for n in threads}
    decodes = [
        decode
        for name, dtype in DTYPES.items()
        for decode in Decode.all_of(name, dtype, sizes.context_tokens, threads)
    ]
    rows = [*reads.values(), *(row for decode in decodes for row in decode.rows)]
    empty = cold_caches(max(threads))
    call_in_rounds(rows, empty, num_passes=num_passes, num_rounds=sizes.num_rounds)
    return decodes, reads


def table(decodes: list[Decode], reads: dict[int, Calls]) -> Iterator[str]:
    """Return a roofline in Markdown, in GB/s per core; ``clock``: random pages, all threads."""
    heads = ["GB/s of one core", "threads", "FLOP/byte", "read", *PLACES, "GFLOP/s"]
    heads += ["by row", "of limit", "limit", "clock"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for decode in decodes:
        read = reads[decode.num_threads].rate_of_core()
        cells = [f"decode/{decode.name}/g{decode.group}", f"{decode.num_threads}"]
        cells += [f"{decode.flop_per_byte:.1f}", _spread(read)]
        cells += [_spread(decode.places[place].rate_of_core()) for place in PLACES]
        cells += [f"{decode.rate('cache') * decode.flop_per_byte:.0f}"]
        cells += [f"{decode.share_by_row:.0%}", f"{decode.of_limit(read.middle):.0%}"]
        cells += [decode.limit(read.middle), _spread(decode.places["random"].rate())]
        yield f"| {' | '.join(cells)} |"


def _spread(rate: Spread) -> str:
    """Return the median and, with more than one pass, the lowest and the highest figure."""
    if rate.lowest == rate.highest:
        return f"{rate.middle:.1f}"
    return f"{rate.middle:.1f} ({rate.lowest:.1f} to {rate.highest:.1f})"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure what limits the CPU kernels' decode.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, few rounds")
    parser.add_argument("--runs", type=int, default=1, help="passes over all of it")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="besides one")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_profile.json"))
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    threads = sorted({1, arguments.threads})
    described = machine(arguments.threads, arguments.runs)
    sizes = QUICK if arguments.quick else FULL
    decodes, reads = measure(sizes, threads=threads, num_passes=arguments.runs)
    print(", ".join(f"{name} {value}" for name, value in described.items()), end="\n\n")
    print("\n".join(table(decodes, reads)), end="\n\n")
    rows = [decode.as_json(reads[decode.num_threads].rate_of_core().middle) for decode in decodes]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=2) + "\n")
    print(f"saved to {arguments.json}")


if __name__ == "__main__":
    main()
