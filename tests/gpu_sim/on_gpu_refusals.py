"""The simulated GPU refuses what a GPU refuses: without that its tests would say nothing.

test_simulated_gpu.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from data_plane.kernels.backends.cuda import CudaKernels

CUDA = torch.device("cuda")


def test_tensors_of_two_devices_are_not_mixed() -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(3, device=CUDA) + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.nn.functional.embedding(torch.tensor([0]), torch.ones(3, 2, device=CUDA))
    assert torch.ones(3, device=CUDA)[torch.tensor([0])].is_cuda  # which a GPU takes


def test_new_memory_is_nan() -> None:
    assert torch.empty(5, dtype=torch.bfloat16, device=CUDA).isnan().all()


@pytest.mark.parametrize("wait", (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero))
def test_nothing_waits_in_a_capture(wait) -> None:
    there = torch.ones(3, device=CUDA)
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        wait(there)


def test_a_capture_changes_nothing_and_a_replay_does() -> None:
    there = torch.ones(3, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.add_(1)
    assert there.tolist() == [1, 1, 1]
    for number in (2, 3):
        graph.replay()
        assert there.tolist() == [number] * 3


def test_a_kernel_gets_addresses_of_the_device() -> None:
    native = import_module("kvplane_kernels._cuda")
    kernels = CudaKernels(native, CUDA)
    pool = torch.zeros(4, 1, 2, 1, 8, 64, device=CUDA)
    ids = torch.tensor([0, 1])
    assert kernels.gather_blocks(pool, ids).device.type == "cuda"
    page = pool[0].nbytes
    sizes = {"num_block_ids": 2, "num_blocks": 4, "num_layers": 1}
    sizes |= {"block_bytes": page, "page_bytes": page}
    with pytest.raises(AssertionError, match="gather_blocks: pool is not on the GPU"):
        native.gather_blocks(
            pool=pool.cpu().data_ptr(),
            blocks=pool.data_ptr(),
            block_ids=ids.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
            **sizes,
        )
