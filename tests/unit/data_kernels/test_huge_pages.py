"""Pools in huge pages are tensors like any other, and the kernels' choice is to be seen."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import generate_latest

from data_plane.kernels.backends import cpu
from data_plane.memory import huge_pages
from data_plane.server.metrics import DataPlaneMetrics
from kvplane.errors import InvalidRequestError

HUGE_PAGE_BYTES = 2 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (5, 2, 8), (3, 1 << 20)], ids=str)
def test_a_tensor_has_the_shape_and_memory_of_its_own(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    first, second = huge_pages.empty(shape, dtype), huge_pages.empty(shape, dtype)
    assert (first.shape, first.dtype) == (torch.Size(shape), dtype)
    assert first.is_contiguous()
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())


def test_large_tensors_begin_at_a_huge_page() -> None:
    assert huge_pages.empty((3, 1 << 20), torch.float32).data_ptr() % HUGE_PAGE_BYTES == 0


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    view = huge_pages.empty((4, 1 << 20), torch.float32).fill_(3)[2, 5:7]
    assert view.tolist() == [3, 3]


def test_a_metric_names_the_instruction_set_of_the_kernels() -> None:
    text = generate_latest(DataPlaneMetrics("p").registry).decode()
    assert f'kvplane_kernel_isa{{isa="{cpu.cpu_isa()}",pool="p"}} 1.0' in text


def test_a_set_that_is_not_there_is_refused_with_the_variables_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise ValueError("KVPLANE_KERNELS_ISA must be one of baseline, is sse9")

    monkeypatch.setattr(cpu.kvplane_kernels, "cpu_isa", refuse)
    with pytest.raises(InvalidRequestError, match="must be one of baseline, is sse9"):
        cpu.cpu_isa()
