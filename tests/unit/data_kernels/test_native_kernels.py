"""What CPU and CUDA kernels have in common: how tensors become arguments of native functions."""

from __future__ import annotations

import kvplane_kernels
import pytest
import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.backends.native import NativeKernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from tests.helpers.refusals import refused

KERNELS: NativeKernels = CpuKernels(1)
PAGES = (4, 2, 2, 8, 16)  # blocks, key and value, heads, tokens, elements
POOL = (4, 3, *PAGES[1:])  # with 3 layers


def write(pages: torch.Tensor, num_tokens: int = 5, first_slot: int = 6) -> torch.Tensor:
    """Random keys, which are also the values."""
    key = torch.rand(num_tokens, 2, 16)
    slots = torch.arange(first_slot, first_slot + num_tokens)
    KERNELS.reshape_and_cache(WriteArguments(key, key, pages, slots))
    return key


@pytest.mark.parametrize("scale", [None, 0.5])
def test_scores_are_scaled_by_the_head_size_unless_told_otherwise(scale: float | None) -> None:
    pages = torch.zeros(PAGES)
    key = write(pages, num_tokens=8, first_slot=0)
    query = torch.rand(1, 2, 16)
    arguments = AttentionArguments(
        query,
        pages,
        torch.tensor([[0]], dtype=torch.int32),
        torch.tensor([0, 1]),
        torch.tensor([8]),
        AttentionOptions() if scale is None else AttentionOptions(scale=scale),
    )
    scores = torch.einsum("qhd,thd->hqt", query, key) * (0.25 if scale is None else scale)
    want = torch.einsum("hqt,thd->qhd", scores.softmax(-1), key)
    got = KERNELS._attend(arguments, None, None, share_reads=True, num_threads=1)
    torch.testing.assert_close(got, want)
    out, lse = torch.empty(1, 2, 16), torch.empty(1, 2)
    assert KERNELS._attend(arguments, out, lse, share_reads=True, num_threads=1) is out
    assert torch.equal(out, got)
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(0, 1))
    for bad_out, bad_lse, field in ((out[:, :1], lse, "out"), (out, lse.double(), "lse")):
        with refused(InvalidRequestError, field):
            KERNELS._attend(arguments, bad_out, bad_lse, share_reads=True, num_threads=1)


def test_ids_and_pairs_may_have_strides() -> None:
    pool = torch.rand(POOL)
    before = pool.clone()
    assert torch.equal(
        KERNELS.gather_blocks(pool, torch.tensor([3, 9, 1, 9])[::2]),
        before[[3, 1]].transpose(0, 1),
    )
    KERNELS.copy_blocks(pool, torch.tensor([[3, 2], [0, 1]]).flip(0).t().contiguous().t())
    assert torch.equal(pool[1], before[0])
    assert torch.equal(pool[2], before[3])


def test_blocks_are_cleared_whole_and_alone() -> None:
    pool = torch.rand(POOL) + 1
    before = pool.clone()
    KERNELS.clear_blocks(pool, torch.tensor([2, 0]))
    assert not pool[[0, 2]].any()
    assert torch.equal(pool[[1, 3]], before[[1, 3]])


def test_tensors_of_another_device_than_the_kernels_are_refused() -> None:
    of_gpu = NativeKernels(kvplane_kernels, torch.device("cuda", 0))
    pages, key = torch.zeros(PAGES), torch.zeros(1, 2, 16)
    with refused(InvalidRequestError, "pages", match="must be on cuda:0, is on cpu"):
        of_gpu.reshape_and_cache(WriteArguments(key, key, pages, torch.arange(1)))
    with refused(InvalidRequestError, "pool", match="cuda:0"):
        of_gpu.copy_blocks(torch.zeros(POOL), torch.zeros(0, 2, dtype=torch.int64))
