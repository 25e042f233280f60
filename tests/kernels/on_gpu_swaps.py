"""Swaps between a GPU and every kind of host memory, by the copy engine and by the kernel.

benchmarks/gpu/first.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from data_plane.kernels.backends.cuda import CudaKernels

CUDA = torch.device("cuda")


def swapped(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """What the destination must hold afterwards."""
    expected = destination.clone()
    for from_block, to_block in pairs.tolist():
        expected[to_block] = source[from_block]
    return expected


def random_pairs(num_from: int, num_to: int) -> torch.Tensor:
    """Runs of neighbours and single ones, in no order; some blocks are written twice."""
    starts = torch.stack((torch.randint(num_from - 9, (40,)), torch.randint(num_to - 9, (40,))), 1)
    runs = (starts[:, None] + torch.arange(9)[None, :, None])[::2].reshape(-1, 2)
    pairs = torch.cat((runs, starts))
    return pairs[torch.randperm(len(pairs))].contiguous()


# 4 KiB: a run of nine is small. 64 KiB: all are the copy engine's, but on the default stream none.
# 256 KiB: there, runs of four and more are.
@pytest.mark.parametrize("layers", (1, 16, 64), ids=("small", "medium", "large"))
@pytest.mark.parametrize("kind", ("pinned", "registered", "pageable"))
@pytest.mark.parametrize("seed", range(3))
def test_swaps_give_what_one_by_one_gives(seed: int, kind: str, layers: int) -> None:
    torch.manual_seed(seed)
    kernels = CudaKernels(import_module("kvplane_kernels._cuda"), CUDA)
    shape = (layers, 2, 4, 4, 64)
    device, host = torch.randn(60, *shape).bfloat16(), torch.randn(90, *shape).bfloat16()
    there = device.to(CUDA)
    if kind == "pinned":
        host = host.pin_memory()
    runtime = torch.cuda.cudart()
    if kind == "registered":  # As the data plane pins its host tier.
        assert int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 1)) == 0
    out, back = random_pairs(60, 90), random_pairs(90, 60)
    stream = torch.cuda.Stream() if seed else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    expected_host = swapped(device, host, out)
    with torch.cuda.stream(stream):
        kernels.swap_blocks(there, host, out)
    stream.synchronize()
    assert torch.equal(host, expected_host)
    expected = swapped(host, device, back)
    with torch.cuda.stream(stream):
        kernels.swap_blocks(host, there, back)
    stream.synchronize()
    assert torch.equal(there.cpu(), expected)
    if kind == "registered":
        assert int(runtime.cudaHostUnregister(host.data_ptr())) == 0


def test_a_kernel_that_follows_sees_what_was_swapped_in() -> None:
    kernels = CudaKernels(import_module("kvplane_kernels._cuda"), CUDA)
    host = torch.randn(300, 1, 2, 1, 8, 64).pin_memory()
    there = torch.zeros(300, 1, 2, 1, 8, 64, device=CUDA)
    order = torch.randperm(300)
    kernels.swap_blocks(host, there, torch.stack((torch.arange(300), order), dim=1))
    blocks = kernels.gather_blocks(there, order)
    assert torch.equal(blocks[0].cpu(), host[:, 0])
