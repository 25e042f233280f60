"""Comparisons of calls on the CPU: each yields groups of calls whose first one the others are
compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch

from benchmarks.attention_cpu.kernels import (
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
from benchmarks.common.report import markdown
from benchmarks.common.timing import Calls, quantile
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern

Groups = Iterator[list[Calls]]

NUM_SHARING: Final = 16
STRIDES: Final = (2, 4, 8, 16)
OWN_TOKENS: Final = 256


def shared(sizes: Sizes, num_threads: int) -> Groups:
    """Yield decodes of sequences with a common prefix: reading it once for all of them, reading it
    for each of them (``apart``), and with blocks of its own for each (``copies``).
    """
    num_common, num_own = sizes.context_tokens // BLOCK_SIZE, OWN_TOKENS // BLOCK_SIZE
    tokens = sizes.context_tokens + OWN_TOKENS
    starts, lens = torch.arange(NUM_SHARING + 1), torch.full((NUM_SHARING,), tokens)
    together, apart = CpuKernels(num_threads), CpuKernels(num_threads, share_reads=False)
    for name in ("bf16", "e4m3"):
        pages = random_pool(NUM_SHARING * (num_common + num_own), DTYPES[name])[:, 0]
        copies = torch.randperm(len(pages)).view(NUM_SHARING, -1)
        common = copies.clone()
        common[:, :num_common] = copies[0, :num_common]
        for group in GROUPS:
            query = torch.randn(NUM_SHARING, NUM_KV_HEADS * group, HEAD_SIZE)
            query = query.to(query_dtype_of(DTYPES[name]))
            calls = []
            for side, ours, tables in (
                ("shared", together, common),
                ("apart", apart, common),
                ("copies", together, copies),
            ):
                arguments = AttentionArguments(query, pages, tables, starts, lens)
                run = partial(ours.paged_attention, arguments)
                calls.append(Calls(f"{name}/g{group}, {side}", "tokens/s", NUM_SHARING, run))
            yield calls


def sparse(sizes: Sizes, num_threads: int) -> Groups:
    """Yield decodes and a prefill whose heads see all blocks, and then fewer and fewer: blocks of
    64 tokens, of which two are local and one in ``stride`` is seen from everywhere.
    """
    kernels, tokens, num_heads = CpuKernels(num_threads), sizes.context_tokens, 4 * NUM_KV_HEADS
    pages = random_pool(BATCH * (tokens // BLOCK_SIZE), torch.bfloat16)[:, 0]
    tables = torch.randperm(len(pages)).view(BATCH, -1)
    for what, num_sequences, query_len in (("decode", BATCH, 1), ("prefill", 1, tokens)):
        lens = torch.full((num_sequences,), tokens)
        starts = torch.arange(num_sequences + 1) * query_len
        query = torch.randn(num_sequences * query_len, num_heads, HEAD_SIZE).to(torch.bfloat16)
        calls = []
        for stride in (1, *STRIDES):
            pattern = None if stride == 1 else BlockPattern(64, 2, stride)
            options = AttentionOptions(block_pattern=pattern)
            batch = tables[:num_sequences]
            arguments = AttentionArguments(query, pages, batch, starts, lens, options)
            run = partial(kernels.paged_attention, arguments)
            calls.append(Calls(f"{what}, 1 block in {stride}", "tokens/s", len(query), run))
        yield calls


PARTS: Final = {"shared": shared, "sparse": sparse}


def table(groups: Sequence[Sequence[Calls]]) -> Iterator[str]:
    """Yield a table of times, each beside the one of its group's first row. The CPU time is that of
    all threads in the call that took the least.
    """
    heads = ("", "ms, median", "CPU ms, least", "× first")
    return markdown(heads, (_cells(row, group[0]) for group in groups for row in group))


def _cells(row: Calls, first: Calls) -> list[str]:
    return [
        row.name,
        f"{1e3 * quantile(row.seconds, 0.5):.3g}",
        f"{1e3 * row.least_cpu_s:.3g}",
        f"{row.least_cpu_s / first.least_cpu_s:.2f}",
    ]
