"""How sequences are cut into splits, and how much memory their partial results take."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import FP8, Case, assert_as_exact_as_torch, assert_same_bits, build
from launched import Launched, launched_kernels

from data_plane.kernels.arguments import AttentionArguments, HostLengths, SharedPlans
from data_plane.kernels.backends.cuda import CudaKernels

E4M3, _ = FP8
BFLOAT, FLOAT = torch.bfloat16, torch.float32
GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("device")


def of_lengths(
    lens: list[tuple[int, int]], heads: tuple[int, int], block_size: int, max_blocks: int
) -> AttentionArguments:
    """Arguments of these (query_len, context_len); only their shapes count."""
    starts = np.cumsum([0] + [query_len for query_len, _ in lens])
    contexts = np.array([context_len for _, context_len in lens])
    query = torch.empty((int(starts[-1]), heads[0], 128), dtype=BFLOAT)
    pages = torch.empty((9, 2, heads[1], block_size, 128), dtype=BFLOAT)
    tables = torch.empty((len(lens), max_blocks), dtype=torch.int32)
    there = [torch.empty(n, dtype=torch.int64) for n in (len(starts), len(contexts))]
    lengths = HostLengths(starts, contexts)
    return AttentionArguments(query, pages, tables, *there, lengths=lengths)


def launches_of(device: DeviceBackend) -> list[Launched]:
    """Since the last call. A GPU does not tell."""
    return [] if device.torch_device.type == "cuda" else launched_kernels(device.native)


def test_long_contexts_are_split_by_the_own_lengths_of_a_sequence(device: DeviceBackend) -> None:
    def splits(query_len: int, context_len: int, *neighbours: tuple[int, int]) -> float:
        lens = [(query_len, context_len), *neighbours]
        arguments = of_lengths(lens, (32, 8), 16, 1 << 13)
        kernels = CudaKernels(device.native, torch.device("cpu"))
        return float(kernels.count_partials(arguments)[0]) / query_len

    assert splits(1, 100_000) == splits(8, 100_000) == 196  # of 512 tokens
    assert splits(64, 100_000) == splits(64, 100_000, (1, 50), (4096, 4096)) == 16
    assert splits(9, 100_000) == 49  # of 2048 tokens, and not less
    assert splits(512, 100_000) == 2
    for query_len, context_len in ((1, 512), (64, 2048), (1024, 100_000), (4096, 4096)):
        assert splits(query_len, context_len) == 0


@pytest.mark.parametrize("pages_dtype", (BFLOAT, E4M3), ids=str)
@pytest.mark.parametrize(
    "head_size", (64, 256, *(pytest.param(n, marks=pytest.mark.nightly) for n in (128, 192)))
)
@pytest.mark.parametrize("query_len", (3, 8))
def test_wide_tiles_of_speculative_rows_change_no_bit(
    device: DeviceBackend, query_len: int, head_size: int, pages_dtype: torch.dtype
) -> None:
    lens = ((query_len, 100), (1, 70), (query_len, query_len))
    case = Case(lens=lens, heads=(4, 1), head_size=head_size, dtype=BFLOAT)
    assert_as_exact_as_torch(case)
    batch = build(replace(case, pages_dtype=pages_dtype))
    narrow = device.paged_attention(batch.to_attend())
    wide = device.paged_attention(replace(batch.to_attend(), max_query_len=query_len))
    assert_same_bits(wide, narrow)


@pytest.mark.parametrize(
    ("lens", "columns"),
    (
        (((1, 100), (1, 300)), 1),
        (((1, 100), (40, 90)), 1),  # decodes beside a prefill
        (((3, 100), (1, 300), (40, 90)), 2),
        (((40, 90), (2, 70), (8, 300)), 4),
        (((40, 90), (9, 300), (2, 70)), 1),  # nine tokens of four heads are a long sequence
        (((40, 90),), 1),
    ),
)
@pytest.mark.parametrize("with_plan", (False, True))
def test_tiles_are_as_wide_as_the_widest_short_sequence_beside_a_prefill_too(
    device: DeviceBackend, lens: tuple[tuple[int, int], ...], columns: int, with_plan: bool
) -> None:
    """A column is eight rows. Keys and values are read once for each tile of rows."""
    batch = build(Case(lens=lens, heads=(4, 1), head_size=64, dtype=BFLOAT))
    expected, _ = batch.attend()
    arguments = replace(batch.with_lengths(), max_query_len=max(length for length, _ in lens))
    if with_plan:
        arguments = replace(arguments, plans=SharedPlans())
    launches_of(device)
    out = device.paged_attention(arguments)
    assert_same_bits(out, expected)
    for launch in launches_of(device):
        if launch.kernel == "attend_short":
            assert launch.arguments[2] == str(columns)


def test_memory_is_for_the_splits_that_there_are(device: DeviceBackend) -> None:
    """255 decodes of 1,000 tokens beside a prefill of 8,192, and one of 128k tokens."""
    kernels = CudaKernels(device.native, torch.device("cpu"))
    lens = [(1, 1000)] * 255 + [(8192, 8192)]
    whole = of_lengths([*lens, (1, 1 << 17)], (32, 8), 16, 1 << 13)
    counts = kernels.count_partials(whole)
    assert counts.tolist() == [2] * 255 + [0, 256]
    assert kernels.attention_workspace_bytes(whole, int(counts.sum())) < 20 << 20
    assert kernels.attention_workspace_bytes(whole) > 8 * GIB


def test_no_batch_needs_more_than_the_most(device: DeviceBackend) -> None:
    kernels = CudaKernels(device.native, torch.device("cpu"))
    rng = random.Random(0)
    for _ in range(200):
        heads = rng.choice(((32, 8), (8, 1), (40, 40), (64, 1), (5, 5)))
        contexts = [rng.randrange(1, 1 << rng.randrange(1, 18)) for _ in range(rng.randrange(1, 9))]
        lens = [(min(c, rng.choice((0, 1, 4, 9, 64, 500, 2000))), c) for c in contexts]
        arguments = of_lengths(lens, heads, 16, -(-max(contexts) // 16))
        window = rng.choice((0, 0, 100, 5000))
        options = replace(arguments.options, sliding_window_tokens=window)
        arguments = replace(arguments, options=options, max_query_len=max(q for q, _ in lens))
        needed = int(kernels.count_partials(arguments).sum())
        of_needed = kernels.attention_workspace_bytes(arguments, needed)
        assert of_needed <= kernels.attention_workspace_bytes(arguments), (lens, heads, window)


@pytest.mark.parametrize("max_workspace_bytes", (0, 3_000))
def test_a_batch_that_needs_too_much_memory_runs_in_parts_with_the_same_bits(
    device: DeviceBackend, max_workspace_bytes: int
) -> None:
    lens = ((1, 300), (40, 600), (0, 7), (1, 20), (3, 200))
    batch = build(Case(lens=lens, heads=(2, 1), head_size=16, dtype=BFLOAT))
    expected, expected_lse = batch.attend()
    kernels, launches = device.kernels, []
    for device.kernels.max_workspace_bytes in (GIB, max_workspace_bytes):
        launches_of(device)
        lse = torch.full_like(expected_lse, torch.nan)
        assert_same_bits(device.paged_attention(batch.with_lengths(), lse=lse), expected)
        assert_same_bits(lse, expected_lse)
        launches.append(len(launches_of(device)))
    if device.torch_device.type == "cpu":
        assert launches[0] == 4 and launches[1] > 8
    assert kernels.scratch_bytes > max_workspace_bytes


def test_splits_change_the_last_bits_at_most(device: DeviceBackend) -> None:
    batch = build(Case(lens=((1, 300), (3, 129)), dtype=torch.float32))
    split, split_lse = batch.attend()
    with in_place_of_the_cpu(chosen_backend(split_tokens=512)):
        whole, whole_lse = batch.attend()
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split_lse, whole_lse, rtol=1e-6, atol=1e-6)
