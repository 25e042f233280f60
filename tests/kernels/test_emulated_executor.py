"""The data plane on the CUDA kernels, emulated: what it does on the CPU's, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.errors import InternalError
from kvplane.layout import Layout
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.executor_twins import run_twins
from tests.helpers.data.kernel_faults import FAULTS, with_fault, with_operations
from tests.helpers.data.kernel_sets import emulated_kernels, late_kernels
from tests.helpers.data.plan_author import BLOCK_SIZE, LAYOUT, set_blocks, span, tokens

BACKENDS = {"cpu": lambda: CpuKernels(1), "emulated": emulated_kernels}


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    make: Callable[[], Kernels] = BACKENDS[request.param]
    return make()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("bfloat16", "bfloat16", 4e-2),
        ("float16", "float16", 5e-3),
        ("float32", "bfloat16", 1e-5),
        ("bfloat16", "float8_e4m3fn", 4e-2),
        ("float32", "float8_e5m2", 1e-5),
    ],
)
def test_random_plans_leave_the_same_bytes_and_the_same_answers(
    dtype: str, kv_dtype: str, tolerance: float
) -> None:
    kernels = emulated_kernels()
    run_twins(3, 40, dtype=dtype, kv_dtype=kv_dtype, tolerance=tolerance, kernels=kernels)


def test_random_plans_do_the_same_on_emulated_kernels_that_run_late() -> None:
    kernels, _ = late_kernels(emulated_kernels(), 1)
    run_twins(4, 40, kernels=kernels)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_can_be_planted_in_any_kernels(kernels: Kernels, fault: str) -> None:
    with pytest.raises(AssertionError):
        run_twins(3, 40, kernels=with_fault(kernels, fault))


def test_what_a_kernel_could_not_follow_takes_the_receipt() -> None:
    rig = Rig(kernels=emulated_kernels())
    rig.admit(1)
    rig.start(2, span(1, 12, 1))
    rig.layer(0, 1)
    run = rig.executor._sessions.get(1).latest
    assert run is not None
    run.attention[0].slots.fill_(10**6)  # as a stray write on the device would
    rig.layer(1, 1)
    for _ in range(2):
        with pytest.raises(InternalError, match="bad argument: slots: must be slots"):
            rig.executor.receipt(1)
    whole = set_blocks(1, [(0, 1), (1, 1)], allocated=False)
    again = rig.run(5, whole, span(1, 12, 1), previous=0, resync=True)
    assert again.plan_number == 5


@pytest.mark.parametrize("has_room", [True, False])
def test_a_layer_like_one_before_is_queued_without_checks(has_room: bool) -> None:
    kernels, checked = emulated_kernels(), list[AttentionArguments]()
    attend, layers = kernels.paged_attention, kernels.bound_layers()

    def counted(arguments: AttentionArguments, **there: Any) -> torch.Tensor:
        checked.append(arguments)
        return attend(arguments, **there)

    kernels.paged_attention = counted  # type: ignore[method-assign]
    counting = with_operations(kernels, bound_layers=lambda: layers)
    unbound = with_operations(emulated_kernels())
    rigs = [Rig(kernels=each, num_device_blocks=80) for each in (counting, unbound)]
    lengths = 0, 150, 151, 152  # of both sequences, after each plan
    blocks = -(-lengths[-1] // BLOCK_SIZE)
    tables = [set_blocks(i, [(i * blocks - n, 1) for n in range(1, blocks + 1)]) for i in (1, 2)]
    for number, (first, end) in enumerate(pairwise(lengths), 1):
        spans = [span(i, first, end - first) for i in (1, 2)]
        outputs = []
        for rig in rigs:
            rig.start(number, *(tables if number == 1 else ()), *spans)
            outputs.append([rig.layer(n, 2 * (end - first), seed=number) for n in (0, 1)])
            rig.executor.receipt(1)
        assert all(torch.equal(*both) for both in zip(*outputs, strict=True)), number
        if not has_room:  # for the partial results of both sequences at once
            kernels.max_workspace_bytes = kernels.attention_workspace_bytes(checked[0], 4)
    # In parts, each layer of the second and the third plan.
    assert len(checked) == (2 if has_room else 6)


def layout_of(kv_dtype: str) -> Layout:
    scales = {"key_scales": (0.5, 2.0), "value_scales": (0.25, 4.0)} if "8" in kv_dtype else {}
    return replace(LAYOUT, kv_dtype=kv_dtype, groups=(replace(LAYOUT.groups[0], **scales),))


@pytest.mark.parametrize(
    "kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_blocks_written_whole_keep_their_bits(kernels: Kernels, kv_dtype: str) -> None:
    rig = Rig(layout=layout_of(kv_dtype), kernels=kernels)
    executor = rig.executor
    executor.pools.device_tier.view(torch.uint8).fill_(0x33)
    rig.start(1, set_blocks(1, [(2, 1), (1, 1)]), span(1, 3, BLOCK_SIZE))
    shape = (2, 2, 2, 2, BLOCK_SIZE, 16)
    blocks = torch.empty(shape, dtype=executor.pools.device_tier.dtype)
    bits = blocks.view(torch.uint8)
    # All bytes that there are, so every fp8 number, NaN too, and many NaNs of the wider types.
    bits.copy_(torch.arange(bits.numel()).view_as(bits))
    assert executor.write_blocks(1, 1, 0, blocks) is not None
    expected = torch.full_like(bits, 0x33)
    expected[:, 0, :, :, 3:] = bits[:, 0, :, :, 3:]
    expected[:, 1, :, :, :3] = bits[:, 1, :, :, :3]
    memory = executor.pools.device_tier[[2, 1]].transpose(0, 1).contiguous()
    assert torch.equal(memory.view(torch.uint8), expected)
    expected[:, 1, :, :, 3:] = 0  # what was not written is not shown
    assert torch.equal(executor.read_blocks(1, 1, range(2))[0].view(torch.uint8), expected)


def test_scales_reach_the_kernels_that_write_and_those_that_attend(kernels: Kernels) -> None:
    rig = Rig(layout=layout_of("float8_e4m3fn"), kernels=kernels)
    rig.start(1, set_blocks(1, [(2, 1)]), span(1, 0, 1))
    key, value = tokens(1, seed=1) * 100, tokens(1, seed=2) * 300
    # One token alone attends to itself, so that the answer is its value as it was rounded.
    for layer, scale in ((0, 0.25), (1, 4.0)):
        output = rig.run_layer(layer, tokens(1, 4), key, value)
        assert output is not None
        rounded = (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(output, rounded.repeat_interleave(2, dim=1))
