"""What limits decode on the CPU: memory, arithmetic, or the way from the one to the other.

    python -m benchmarks.attention_profile [--quick] [--threads N] [--json OUT]

The batch of ``benchmarks.attention_cpu`` is measured with its pages in three places: in the cache
(all tables name the same few blocks: what the arithmetic alone allows), in memory in order, and in
memory in random order; beside it the speed at which memory is read. Each with one thread and with
all of them. A row that reaches neither its memory nor its arithmetic waits for lines on their way.

All rates are of unique bytes (of the cache: of bytes read) and of one core: the median call's for a
second of a core's time, so that what other programs took does not count. But threads that other
programs keep from running at once do not share the memory's speed either: what two threads reach
together needs a machine with nothing else running, and ``by the clock`` shows it. Only rows of one
run can be compared.

``by row`` estimates what a call spends on what does not depend on the head size: softmax, sums
over lanes, finding pages. It is the time that is left when the times of head sizes 64 and 128, both
in the cache, are drawn as a line down to a head size of 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.attention_cpu import (
    BATCH,
    BLOCK_SIZE,
    CONTEXT_TOKENS,
    DTYPES,
    GROUPS,
    HEAD_SIZE,
    NUM_KV_HEADS,
    Memory,
    Row,
    machine,
    query_dtype_of,
    random_pool,
)
from data_plane import kernels

CACHE_BYTES = 256 << 10  # that fit into any core's cache, and are far more than one tile
HALF_SIZE = HEAD_SIZE // 2
PLACES = ("cache", "in order", "random")


def attend(pages: torch.Tensor, tables: torch.Tensor, group: int, num_threads: int) -> Row:
    """One query token for each row of the tables."""
    batch, context_tokens = tables.shape[0], tables.shape[1] * BLOCK_SIZE
    head_size = pages.shape[-1]
    shape = (batch, NUM_KV_HEADS * group, head_size)
    query = torch.randn(shape).to(query_dtype_of(pages.dtype))
    starts, lens = torch.arange(batch + 1), torch.full((batch,), context_tokens)
    num_bytes = tables.numel() * pages[0].nbytes

    def run() -> object:
        return kernels.paged_attention(
            query, pages, tables, starts, lens, scale=head_size**-0.5, num_threads=num_threads
        )

    return Row("", "GB/s", num_bytes, run)


def rate_of_core(row: Row) -> float:
    """GB/s."""
    return row.amount / statistics.median(row.cpu_seconds) / 1e9


@dataclass
class Decode:
    """One type, group and number of threads, with its pages in each place."""

    name: str
    group: int
    num_threads: int
    element_bytes: int
    places: dict[str, Row]
    half_size: Row  # in the cache

    @classmethod
    def all_of(cls, name: str, dtype: torch.dtype, tokens: int, threads: list[int]) -> list[Decode]:
        """Every group, on the same pages."""
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
                {place: attend(pages, tables[place], group, count) for place in PLACES},
                attend(half, halved, group, count),
            )
            for group in GROUPS
            for count in threads
        ]

    @property
    def rows(self) -> list[Row]:
        return [*self.places.values(), self.half_size]

    @property
    def flop_per_byte(self) -> float:
        """Of keys and values: a product and a sum for each number and query head."""
        return 2 * self.group / self.element_bytes

    def rate(self, place: str) -> float:
        """GB/s of one core."""
        return rate_of_core(self.places[place])

    @property
    def share_by_row(self) -> float:
        """Of the time in the cache: what does not depend on the head size."""
        half = self.half_size.amount / rate_of_core(self.half_size)
        whole = self.places["cache"].amount / rate_of_core(self.places["cache"])
        return max(0.0, (2 * half - whole) / whole)

    def as_json(self, read: float) -> dict[str, object]:
        """``read``: GB/s of one core that memory allows."""
        return {
            "name": f"decode/{self.name}/g{self.group}",
            "threads": self.num_threads,
            "unit": "GB/s a core",
            "flop_per_byte": self.flop_per_byte,
            "read": round(read, 2),
            **{place.replace(" ", "_"): round(self.rate(place), 2) for place in PLACES},
            "gflops_cache": round(self.rate("cache") * self.flop_per_byte, 1),
            "share_by_row": round(self.share_by_row, 3),
            "limit": self.limit(read),
            "random_by_the_clock": round(self.places["random"].rate(0.5), 2),
            "of_limit": round(self.rate("random") / min(read, self.rate("cache")), 3),
        }

    def limit(self, read: float) -> str:
        """The lower ceiling."""
        return "memory" if read < self.rate("cache") else "arithmetic"


def measure(*, quick: bool, threads: list[int]) -> tuple[list[Decode], dict[int, Row]]:
    """All of it, in rounds after one that does not count; and reading memory, by threads."""
    scale = 4 if quick else 1
    reads = {n: Memory((256 << 20) // scale, n).rows()[0] for n in threads}
    decodes = [
        decode
        for name, dtype in DTYPES.items()
        for decode in Decode.all_of(name, dtype, CONTEXT_TOKENS // scale, threads)
    ]
    rows = [*reads.values(), *(row for decode in decodes for row in decode.rows)]
    for round in range(3 if quick else 12):
        for row in rows:
            row.measure()
            if round == 0:
                row.seconds.clear()
                row.cpu_seconds.clear()
    return decodes, reads


def print_table(decodes: list[Decode], reads: dict[int, Row], described: dict[str, object]) -> None:
    """A roofline: GB/s of one core; and random pages by the clock, GB/s of all threads."""
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    heads = ("threads", "FLOP/byte", "read", *PLACES, "GFLOP/s", "by row", "of limit", "clock")
    print(f"{'GB/s of one core':20}" + "".join(f"{head:>10}" for head in heads) + "  limit")
    for decode in decodes:
        read = rate_of_core(reads[decode.num_threads])
        of_limit = decode.rate("random") / min(read, decode.rate("cache"))
        cells = [f"{decode.num_threads}", f"{decode.flop_per_byte:.1f}", f"{read:.1f}"]
        cells += [f"{decode.rate(place):.1f}" for place in PLACES]
        cells += [f"{decode.rate('cache') * decode.flop_per_byte:.0f}"]
        cells += [f"{decode.share_by_row:.0%}", f"{of_limit:.0%}"]
        cells += [f"{decode.places['random'].rate(0.5):.1f}"]
        name = f"decode/{decode.name}/g{decode.group}"
        print(f"{name:20}" + "".join(f"{cell:>10}" for cell in cells) + f"  {decode.limit(read)}")


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Say what limits the CPU kernels' decode.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, few rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="besides one")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_profile.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    threads = sorted({1, arguments.threads})
    described = machine(arguments.threads)
    decodes, reads = measure(quick=arguments.quick, threads=threads)
    print_table(decodes, reads, described)
    rows = [decode.as_json(rate_of_core(reads[decode.num_threads])) for decode in decodes]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=2) + "\n")
    print(f"saved to {arguments.json}")


if __name__ == "__main__":
    main()
