"""Measures attention over latents against attention over the keys and values that they stand for,
in one layer of DeepSeek V3, on the CPU.

    python -m benchmarks.latents [--rounds N] [--threads N]

There are 128 query heads in bf16. A latent has 512 numbers and 64 with rotary positions; expanded,
each head has a key of 192 and a value of 128. Both take turns, and other memory is read before
every call so that no cache holds what it needs. Figures are milliseconds of the fastest tenth of
the calls (p10), which other programs disturb least. The projections that make keys and values of
new tokens, or absorb them into queries and outputs, are not part of either.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.attention_cpu.report import machine
from benchmarks.common.calls import Calls, call_in_rounds
from benchmarks.common.memory import cold_caches
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory import huge_pages
from data_plane.memory.pages import PageShape
from kvplane.attention_options import AttentionOptions
from kvplane.layout import LATENT, LayerGroup

BLOCK_SIZE: Final = 16
NUM_HEADS: Final = 128
OPTIONS: Final = AttentionOptions(scale=192**-0.5)
GROUPS: Final = {
    "latents": LayerGroup("latent", (0,), 1, 576, cache_kind=LATENT, value_head_size=512),
    "keys and values": LayerGroup("full", (0,), NUM_HEADS, 192, value_head_size=128),
}


@dataclass(frozen=True)
class Case:
    """Sequences with ``context_tokens`` each, of which the last ``query_tokens`` are new."""

    name: str
    num_sequences: int
    context_tokens: int
    query_tokens: int


CASES: Final = (
    Case("decode, 1 sequence of 512", 1, 512, 1),
    Case("decode, 1 sequence of 4096", 1, 4096, 1),
    Case("decode, 4 sequences of 4096", 4, 4096, 1),
    Case("prefill, 256 tokens", 1, 256, 256),
    Case("prefill, 64 tokens after 4032", 1, 4096, 64),
)


def calls(case: Case, kind: str, kernels: CpuKernels) -> Calls:
    """Return one layer's attention. ``kind``: one of ``GROUPS``."""
    group = GROUPS[kind]
    page = PageShape(group, group.num_kv_heads, BLOCK_SIZE)
    num_blocks = case.num_sequences * case.context_tokens // BLOCK_SIZE
    pool = huge_pages.empty((num_blocks, *page.extents), torch.bfloat16)
    pool[:] = torch.randn(page.extents)
    num_tokens = case.num_sequences * case.query_tokens
    arguments = AttentionArguments(
        torch.randn(num_tokens, NUM_HEADS, group.head_size).bfloat16(),
        page.keys_and_values(pool),
        torch.randperm(num_blocks).view(case.num_sequences, -1),
        torch.arange(case.num_sequences + 1) * case.query_tokens,
        torch.full((case.num_sequences,), case.context_tokens),
        OPTIONS,
    )
    return Calls(kind, "tokens/s", num_tokens, lambda: kernels.paged_attention(arguments))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    spec = machine(options.threads, 1)
    print(f"{spec['cpu']}, {options.threads} threads, {spec['isa']}, {options.rounds} rounds\n")
    print("| one layer of DeepSeek V3 | latents, ms | keys and values, ms |\n|---|---|---|")
    for case in CASES:
        rows = [calls(case, kind, CpuKernels(options.threads)) for kind in GROUPS]
        empty = cold_caches(options.threads)
        call_in_rounds(rows, empty, num_passes=1, num_rounds=options.rounds)
        figures = [f"{1e3 * row.amount / row.quantile(0.9):.3g}" for row in rows]
        print(f"| {case.name} | {' | '.join(figures)} |", flush=True)
    tokens = [sum(group.stored_sizes) * group.num_kv_heads * 2 for group in GROUPS.values()]
    print(f"| bytes of a token | {tokens[0]:,} | {tokens[1]:,} |")


if __name__ == "__main__":
    main()
