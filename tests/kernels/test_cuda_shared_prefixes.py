"""Decodes that share blocks: a GPU reads what they share once for several of them, and no bit
depends on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import FP8, Batch, Case, assert_same_bits, build
from test_shared_prefixes import sharing

from data_plane.kernels.arguments import HostLengths
from data_plane.kernels.backends.cuda import CudaKernels
from kvplane.errors import InvalidRequestError

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
# With splits of 64 tokens, the first twelve blocks are three splits.
LENS = ((1, 300), (1, 290), (3, 250), (1, 70), (1, 256), (40, 200), (1, 20), (1, 150), (1, 400))


@pytest.fixture(autouse=True)
def backend() -> Iterator[DeviceBackend]:
    with in_place_of_the_cpu(chosen_backend()) as backend:
        yield backend


def with_and_without(backend: DeviceBackend, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The output where reads are shared, and where they are not; the lse has the same bits."""
    shared, lse = batch.attend()
    alone = DeviceBackend(backend.native, backend.device.type)
    alone.kernels = CudaKernels(backend.native, backend.device, split_tokens=64, share_reads=False)
    lse_alone = torch.full_like(lse, torch.nan)
    out = alone.paged_attention(batch.to_attend(), lse=lse_alone)
    assert_same_bits(lse, lse_alone)
    return shared, out


@pytest.mark.parametrize(
    ("heads", "dtype", "pages_dtype"),
    (
        ((4, 2), BFLOAT, BFLOAT),
        ((4, 2), FLOAT, FLOAT),
        ((10, 1), HALF, HALF),
        ((10, 1), BFLOAT, FP8[0]),
        ((16, 1), BFLOAT, FP8[1]),
        ((20, 1), BFLOAT, BFLOAT),
    ),
    ids=str,
)
def test_sharing_changes_no_bit(
    backend: DeviceBackend, heads: tuple[int, int], dtype: torch.dtype, pages_dtype: torch.dtype
) -> None:
    """The last heads have too many rows for two sequences in a tile, fp32 no tiles."""
    scales = "head" if pages_dtype in FP8 else None
    case = Case(lens=LENS, heads=heads, head_size=16, dtype=dtype, scales=scales)
    batch = sharing(replace(case, pages_dtype=pages_dtype), 12)
    shared, alone = with_and_without(backend, batch)
    assert not shared.isnan().any()
    assert_same_bits(shared, alone)


@pytest.mark.parametrize("head_size", (128, 192, 256))
def test_sharing_changes_no_bit_with_any_tile(backend: DeviceBackend, head_size: int) -> None:
    """Of 32 rows, with queries in shared memory; of 16; and none."""
    lens = ((1, 200), (1, 70), (1, 140))
    case = Case(lens=lens, heads=(4, 1), head_size=head_size, dtype=BFLOAT)
    shared, alone = with_and_without(backend, sharing(case, 12))
    assert_same_bits(shared, alone)


def test_options_change_no_bit(backend: DeviceBackend) -> None:
    for window in (0, 90):
        case = Case(lens=LENS, heads=(4, 2), head_size=16, dtype=BFLOAT, window=window)
        batch = sharing(replace(case, alibi=True, sinks=True, soft_cap=9.0), 12)
        shared, alone = with_and_without(backend, batch)
        assert_same_bits(shared, alone)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))]
)
def test_random_tables_that_share_give_the_bits_of_each_alone(
    backend: DeviceBackend, seed: int
) -> None:
    """Several families, their members in any order, which share more or less with the first."""
    rng = random.Random(seed)
    num = rng.randrange(2, 45)
    lens = tuple((1, rng.randrange(1, 300)) for _ in range(num))
    heads = rng.choice(((4, 2), (3, 3), (7, 1)))
    case = Case(lens=lens, heads=heads, head_size=16, dtype=BFLOAT, block_size=rng.choice((8, 5)))
    batch = build(replace(case, seed=seed))
    tables = batch.block_tables.clone()
    used = (-(-batch.context_lens // case.block_size)).tolist()
    for s in range(num):
        other = rng.randrange(num)
        full = lens[other][1] // case.block_size  # its last block may hold NaN
        count = min(used[s], full, rng.choice((0, 5, 20, 60)))
        tables[s, :count] = tables[other, :count]
    shared, alone = with_and_without(backend, replace(batch, block_tables=tables.int()))
    assert not shared.isnan().any()
    assert_same_bits(shared, alone)


def test_what_is_shared_is_read_once_for_as_many_sequences_as_a_tile_has(
    backend: DeviceBackend,
) -> None:
    if backend.device.type == "cuda":
        return  # Only the emulator counts bytes.

    def num_bytes(num: int, kernels: CudaKernels, *, tables_may_share: bool = True) -> int:
        case = Case(lens=((1, 1025),) * num, heads=(4, 1), head_size=64, dtype=BFLOAT)
        batch = sharing(case, 64)
        arguments = batch.to_attend()
        starts, lens = batch.query_starts.numpy(), batch.context_lens.numpy()
        lengths = HostLengths(starts, lens, tables_may_share)
        before = backend.native.num_copied_bytes()
        kernels.paged_attention(replace(arguments, lengths=lengths))
        return int(backend.native.num_copied_bytes() - before)

    alone = CudaKernels(backend.native, backend.device, split_tokens=64, share_reads=False)
    of_token = 2 * 64 * 2
    assert num_bytes(8, alone) == 8 * 1025 * of_token
    assert num_bytes(8, backend.kernels) == (1024 + 8) * of_token
    assert num_bytes(9, backend.kernels) == (2 * 1024 + 9) * of_token
    assert num_bytes(8, backend.kernels, tables_may_share=False) == 8 * 1025 * of_token


def test_a_bad_entry_that_sequences_share_is_reported(backend: DeviceBackend) -> None:
    batch = sharing(Case(lens=((1, 200), (1, 180)), heads=(4, 2), head_size=16, dtype=BFLOAT), 11)
    tables = batch.block_tables.clone()
    tables[:, 2] = 10**6
    with pytest.raises(InvalidRequestError) as caught:
        replace(batch, block_tables=tables).attend()
    assert caught.value.field == "block_tables"


def test_a_sequence_without_room_is_reported_and_the_others_share(backend: DeviceBackend) -> None:
    batch = sharing(Case(lens=((1, 200),) * 3, heads=(4, 2), head_size=16, dtype=BFLOAT), 11)
    arguments = backend._all_there(batch.to_attend())
    starts, lens = batch.query_starts.numpy(), batch.context_lens.numpy()
    room = int(
        backend.kernels.count_partials(replace(arguments, lengths=HostLengths(starts, lens)))[
            :2
        ].sum()
    )
    num_bytes = backend.kernels.attention_workspace_bytes(arguments, room)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=backend.device)
    out = backend.kernels.paged_attention(arguments, workspace=workspace)
    with pytest.raises(InvalidRequestError) as caught:
        backend.check_faults()
    assert caught.value.field == "workspace"
    assert_same_bits(out.cpu()[:2], backend.paged_attention(batch.to_attend())[:2])
    assert np.isfinite(out[:2].float().cpu().numpy()).all()
