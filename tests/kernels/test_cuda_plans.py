"""A plan made once serves all calls with the same lengths and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import DeviceBackend
from kernel_cases import FP8, Batch, Case, assert_same_bits, build, with_pages

from data_plane.kernels.arguments import AttentionArguments, SharedPlans
from data_plane.kernels.backends.cuda import MAX_SHARED_PLANS
from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.kernel_sets import emulated_kernels
from tests.helpers.data.plan_author import span

BFLOAT, FLOAT = torch.bfloat16, torch.float32
LENS = ((1, 300), (40, 270), (0, 7), (1, 20), (3, 200))
SHORT = ((1, 130), (3, 70), (20, 30))
TYPES = ((BFLOAT, BFLOAT), (torch.float16, FP8[0]), (FLOAT, FLOAT))


def layers_of(case: Case) -> list[Batch]:
    """Three layers: their own queries, keys and values, the same lengths and tables."""
    first, *others = (build(replace(case, seed=seed)) for seed in range(3))
    return [first, *(replace(layer, block_tables=first.block_tables) for layer in others)]


def launches_of(device: DeviceBackend, arguments: AttentionArguments) -> tuple[torch.Tensor, int]:
    """The output, and how many kernels were launched for it: 0 on a GPU, which does not tell."""
    if device.torch_device.type == "cuda":
        return device.paged_attention(arguments), 0
    before = device.native.num_launches()
    out = device.paged_attention(arguments)
    return out, device.native.num_launches() - before


@pytest.mark.parametrize(("dtype", "pages_dtype"), TYPES, ids=str)
def test_layers_that_share_a_plan_give_the_bits_of_layers_that_do_not(
    device: DeviceBackend, dtype: torch.dtype, pages_dtype: torch.dtype
) -> None:
    case = Case(lens=LENS, heads=(2, 1), head_size=16, dtype=dtype)
    layers = layers_of(with_pages(case, pages_dtype))
    plans, launches = SharedPlans(), []
    for layer in layers:
        alone, num_alone = launches_of(device, layer.with_lengths())
        out, num_launches = launches_of(device, layer.with_lengths(plans))
        assert_same_bits(out, alone)
        launches.append(num_alone - num_launches)
    assert launches == [0, 1, 1] or device.torch_device.type == "cuda"
    assert len(plans.made) == 1


def test_a_call_that_needs_another_plan_makes_it(device: DeviceBackend) -> None:
    """Layers with and without a window, and with other heads, in turn."""
    plans = SharedPlans()
    batch = build(Case(lens=SHORT, heads=(2, 1), head_size=16, dtype=BFLOAT))
    for window in (0, 100, 0, 100):
        windowed = replace(batch, window=window)
        alone = device.paged_attention(windowed.with_lengths())
        assert_same_bits(device.paged_attention(windowed.with_lengths(plans)), alone)
    assert len(plans.made) == 2


def test_a_batch_keeps_a_few_plans_whatever_its_callers_ask_for(device: DeviceBackend) -> None:
    plans = SharedPlans()
    batch = build(Case(lens=SHORT, heads=(2, 1), head_size=16, dtype=BFLOAT))
    for window in range(1, MAX_SHARED_PLANS + 4):
        device.paged_attention(replace(batch, window=window).with_lengths(plans))
        assert len(plans.made) <= MAX_SHARED_PLANS
    alone = device.paged_attention(batch.with_lengths())
    assert_same_bits(device.paged_attention(batch.with_lengths(plans)), alone)


def test_a_plan_is_refused_for_another_batch(device: DeviceBackend) -> None:
    batch = build(Case(lens=LENS, heads=(2, 1), head_size=16, dtype=BFLOAT))
    kernels, arguments = device.kernels, batch.with_lengths()
    if device.torch_device.type == "cuda":
        arguments = device._all_there(arguments)
    plan = kernels.plan(arguments)
    out = kernels.paged_attention(arguments, plan=plan)
    assert_same_bits(out.cpu(), device.paged_attention(batch.to_attend()))
    options = replace(arguments.options, sliding_window_tokens=100)
    masked = replace(arguments.options, block_pattern=BlockPattern(16, 1, 2))
    for other in (
        replace(arguments, options=options),
        replace(arguments, options=masked),
        replace(arguments, max_query_len=70),
        replace(arguments, query=torch.cat([arguments.query] * 2, dim=1)),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            kernels.paged_attention(other, plan=plan)
        assert caught.value.field == "plan"
    # A plan in which families share tiles, for calls that have none, and the other way round.
    may_share = replace(arguments.lengths, tables_may_share=True)
    sharing = replace(arguments, lengths=may_share)
    for made_for, other in ((arguments, sharing), (sharing, arguments)):
        with pytest.raises(InvalidRequestError) as caught:
            kernels.paged_attention(other, plan=kernels.plan(made_for))
        assert caught.value.field == "plan"
    small = torch.empty(4096, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(InvalidRequestError):
        kernels.paged_attention(arguments, workspace=small, plan=plan)


@pytest.mark.parametrize("masked", (False, True), ids=("plain", "masked"))
def test_a_batch_that_needs_several_calls_is_planned_for_each(
    device: DeviceBackend, masked: bool
) -> None:
    pattern = (16, 1, 0, 0) if masked else None
    case = Case(lens=LENS, heads=(2, 1), head_size=16, dtype=BFLOAT, pattern=pattern, masked=masked)
    batch = build(case)
    expected = device.paged_attention(batch.with_lengths())
    device.kernels.max_workspace_bytes = 3_000
    plans = SharedPlans()
    for _ in range(2):
        assert_same_bits(device.paged_attention(batch.with_lengths(plans)), expected)
    assert list(plans.made.values()) == [None]


def test_the_layers_of_a_step_share_one_plan() -> None:
    kernels = emulated_kernels()
    rig = Rig(kernels=kernels)
    rig.admit(1)
    native, launches = kernels._module, []
    for number in (2, 3):
        start = native.num_launches()
        rig.start(number, span(1, 12 if number == 2 else 13, 1))
        for layer in (0, 1):
            rig.layer(layer, 1)
            launches.append(native.num_launches() - start)
            start = native.num_launches()
        assert rig.executor.receipt(1) is not None
    # A write, the plan in the first layer, and the attention.
    assert launches[0] == launches[1] + 1 and launches[:2] == launches[2:]
