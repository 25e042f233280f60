"""Block-sparse attention: which blocks a pattern names, that hidden ones do not matter, and what is
refused. ``test_oracle_attention.py`` compares results with float64, and ``shared_reads.cpp`` counts
the tiles that the CPU reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from backends import DeviceBackend
from kernel_cases import Batch, Case, assert_as_exact_as_torch, assert_same_bits, build, with_pages

from data_plane.kernels.arguments import AttentionArguments, HostLengths
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError
from kvplane.tensor import Tensor

CASE = Case(lens=((1, 700), (40, 330)), heads=(6, 3), pattern=(32, 1, 5, 1))
MASKED = Case(lens=((1, 700), (40, 330)), heads=(6, 3), pattern=(32, 1, 0, 0), masked=True)
LOCAL = BlockPattern(32, 1)


def named(pattern: BlockPattern, num_heads: int, kv_heads: range) -> list[list[int]]:
    """The blocks below 12 that each head sees from everywhere."""
    rows = pattern.seen_blocks(num_heads, kv_heads)
    return [[block for block in range(12) if row[block % len(row)]] for row in rows]


def test_a_stride_names_the_blocks_that_vllm_names() -> None:
    """By hand, from (block + head * step + 1) % stride == 0, or with the number of the KV head."""
    assert named(BlockPattern(16, 1, 4), 2, range(2)) == [[3, 7, 11], [3, 7, 11]]
    assert named(BlockPattern(16, 1, 4, 1), 3, range(3)) == [[3, 7, 11], [2, 6, 10], [1, 5, 9]]
    assert named(BlockPattern(16, 1, 4, 3), 2, range(1)) == [[3, 7, 11], [0, 4, 8]]
    by_kv_head = [[3, 7, 11], [3, 7, 11], [1, 5, 9], [1, 5, 9]]
    assert named(BlockPattern(16, 1, 4, -2), 4, range(2)) == by_kv_head
    assert named(BlockPattern(16, 1), 1, range(1)) == [[]]


@pytest.mark.parametrize("step", (0, 1, 3, -1, -2))
def test_a_shard_counts_the_heads_of_the_model(step: int) -> None:
    pattern = BlockPattern(16, 1, 7, step)
    whole = pattern.seen_blocks(12, range(4))
    assert pattern.seen_blocks(6, range(2)) + pattern.seen_blocks(6, range(2, 4)) == whole
    batch = build(replace(CASE, heads=(12, 4), pattern=(32, 1, 7, step)))
    arguments, halves = batch.to_attend(), []
    for first in (0, 2):
        pages, query = batch.pages[:, :, first : first + 2], batch.query[:, 3 * first :][:, :6]
        half = replace(arguments, query=query, pages=pages, first_kv_head=first)
        halves.append(CpuKernels(1).paged_attention(half))
    assert_same_bits(torch.cat(halves, dim=1), CpuKernels(1).paged_attention(arguments))


def hidden_from_all(batch: Batch) -> list[tuple[int, int]]:
    """The entries of tables, by sequence and index, of which no head of a query sees a token."""
    found = []
    block_size, heads = batch.pages.shape[3], (batch.query.shape[1], batch.pages.shape[2])
    assert batch.pattern is not None
    for s, context in enumerate(batch.context_lens.tolist()):
        num_queries = int(batch.query_starts[s + 1] - batch.query_starts[s])
        positions = torch.arange(context - num_queries, context)[:, None]
        remote = None if batch.seen_blocks is None else batch.seen_blocks[s]
        seen = oracle.in_seen_blocks(batch.pattern, heads, positions, context, remote)
        seen = (seen & (torch.arange(context) <= positions)).any(0).any(0)
        found += [
            (s, i)
            for i in range(-(-context // block_size))
            if not seen[i * block_size : (i + 1) * block_size].any()
        ]
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", (replace(CASE, pattern=(32, 1, 9, 0)), MASKED), ids=str)
def test_what_no_head_sees_does_not_matter(cpu: str, case: Case, dtype: torch.dtype) -> None:
    batch = build(replace(case, dtype=dtype))
    expected, hidden = batch.attend()[0], hidden_from_all(batch)
    assert len(hidden) > 10
    for s, i in hidden:
        batch.pages[batch.block_tables[s, i]] = torch.nan
    assert_same_bits(batch.attend()[0], expected)


@pytest.mark.parametrize("pages_dtype", (torch.bfloat16, torch.float8_e4m3fn), ids=str)
@pytest.mark.parametrize("heads", ((8, 1), (40, 1)), ids=str)
def test_a_device_masks_the_rows_of_wide_tiles(
    device: DeviceBackend, heads: tuple[int, int], pages_dtype: torch.dtype
) -> None:
    """Up to 32 rows of a short sequence, which take tiles of 16, and more."""
    case = Case(((3, 200), (4, 130), (1, 300)), heads, 128, dtype=torch.bfloat16)
    assert_as_exact_as_torch(with_pages(replace(case, pattern=(32, 1, 3, 1)), pages_dtype))


def of_blocks(*shape: int, dtype: str = "uint8") -> Tensor:
    return Tensor.zeros(dtype, shape)


BAD_PATTERNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "no tokens": ("block_tokens", (0, 1)),
    "half a unit": ("block_tokens", (24, 1)),
    "too many tokens": ("block_tokens", (1 << 17, 1)),
    "negative tokens": ("block_tokens", (-16, 1)),
    "nothing local": ("local_blocks", (16, 0)),
    "much local": ("local_blocks", (16, 2**31)),
    "negative stride": ("vertical_stride", (16, 1, -1)),
    "wide stride": ("vertical_stride", (16, 1, 1025)),
    "large step": ("head_sliding_step", (16, 1, 1, 2**31)),
    "large step back": ("head_sliding_step", (16, 1, 1, -(2**31))),
}


@pytest.mark.parametrize("name", BAD_PATTERNS)
def test_patterns_out_of_range_are_refused(name: str) -> None:
    field, values = BAD_PATTERNS[name]
    with pytest.raises(InvalidRequestError) as caught:
        BlockPattern(*values)
    assert caught.value.field == field


def options(pattern: BlockPattern | None, seen: Tensor | None = None) -> Callable[[], Any]:
    return lambda: AttentionOptions(block_pattern=pattern, seen_blocks=seen)


BAD_OPTIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a mask alone": ("block_pattern", options(None, of_blocks(2, 6, 22))),
    "a mask and a stride": ("block_pattern", options(BlockPattern(32, 1, 2), of_blocks(2, 6, 22))),
    "a mask and a step": (
        "block_pattern",
        options(BlockPattern(32, 1, 0, 1), of_blocks(2, 6, 22)),
    ),
    "a mask of floats": ("seen_blocks", options(LOCAL, of_blocks(2, 6, 22, dtype="float32"))),
    "a flat mask": ("seen_blocks", options(LOCAL, of_blocks(6, 22))),
    "an empty mask": ("seen_blocks", options(LOCAL, of_blocks(2, 6, 0))),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_masks_are_refused(name: str) -> None:
    field, make = BAD_OPTIONS[name]
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.field == field


BAD_ARGUMENTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "parts of the pool's blocks": (
        "options.block_pattern.block_tokens",
        options(BlockPattern(48, 1)),
    ),
    "a mask of fewer sequences": ("options.seen_blocks", options(LOCAL, of_blocks(1, 6, 22))),
    "a mask of fewer heads": ("options.seen_blocks", options(LOCAL, of_blocks(2, 3, 22))),
    "a mask of fewer blocks": ("options.seen_blocks", options(LOCAL, of_blocks(2, 6, 21))),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_what_does_not_fit_the_call_is_refused(name: str) -> None:
    field, make = BAD_ARGUMENTS[name]
    arguments = build(replace(CASE, block_size=32)).to_attend()
    with pytest.raises(InvalidRequestError) as caught:
        replace(arguments, options=make())
    assert caught.value.field == field
    if field == "options.seen_blocks":  # also where only ``lengths`` tells
        lengths = HostLengths(arguments.query_starts.numpy(), arguments.context_lens.numpy())
        with pytest.raises(InvalidRequestError):
            replace(arguments, options=make(), lengths=lengths)


def test_a_pattern_of_too_many_heads_is_refused() -> None:
    query = torch.zeros(1, (1 << 14) + 1, 8)
    pages, one = torch.zeros(1, 2, 1, 16, 8), torch.tensor([1])
    tables, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1])
    wide = AttentionOptions(block_pattern=BlockPattern(16, 1, 1024))
    with pytest.raises(InvalidRequestError) as caught:
        AttentionArguments(query, pages, tables, starts, one, wide)
    assert caught.value.field == "query"
