"""Layers that were called before are written and attended by one native call, which gives the same
bits as two, counts the same, and is made for tensors that were checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_plane.execution.plan_runner import PlanLayer
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.bound_layers import BoundLayers
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import BlockNotWritableError, InvalidRequestError
from kvplane.layout import Layout
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import LAYOUT, set_blocks, span, tokens, trim

PROMPTS = {1: 11, 2: 5}
NUM_DECODED = 6


class Counting:
    """Kernels that count the calls of attention which are not bound."""

    def __init__(self) -> None:
        self.num_calls = 0
        kernels = CpuKernels(1)
        layers: BoundLayers = kernels.bound_layers()
        attend = kernels.paged_attention

        def counted(arguments: AttentionArguments) -> torch.Tensor:
            self.num_calls += 1
            return attend(arguments)

        self.kernels = with_operations(
            kernels, paged_attention=counted, bound_layers=lambda: layers
        )


def outputs(kernels: Kernels, layout: Layout, options: Sequence[AttentionOptions]) -> Any:
    """Of a prompt of two sequences and of the tokens that follow; and the rig."""
    rig = Rig(kernels=kernels, layout=layout)
    made: list[torch.Tensor] = []
    dtype = getattr(torch, layout.dtype)
    for number in range(1, NUM_DECODED + 2):
        changes, spans = [], [span(i, n + number - 2, 1) for i, n in PROMPTS.items()]
        if number == 1:
            changes = [set_blocks(i, [(4 * i - 4 + j, 1) for j in range(3)]) for i in PROMPTS]
            spans = [span(i, 0, num) for i, num in PROMPTS.items()]
        rig.start(number, changes=changes, spans=spans)
        num = sum(PROMPTS.values()) if number == 1 else len(PROMPTS)
        for layer in LAYERS:
            seed = 100 * number + layer
            query = tokens(num, 4, seed=seed).to(dtype)
            key, value = (tokens(num, seed=seed + i).to(dtype) for i in (10, 20))
            chosen = options[number % len(options)]
            out = rig.executor.layer(
                1, layer, query, key, value, options=chosen, **of_latest(rig.executor)
            )
            assert out is not None
            made.append(out)
        assert rig.author.read_receipt(rig.executor.receipt(1)).plan_number == number
    rig.executor.check_integrity()
    return made, rig


LAYOUTS = {
    "float32": LAYOUT,
    "bfloat16": replace(LAYOUT, dtype="bfloat16", kv_dtype="bfloat16"),
    "fp8": replace(
        LAYOUT,
        kv_dtype="float8_e4m3fn",
        groups=(replace(LAYOUT.groups[0], key_scales=(0.5, 0.25), value_scales=(2.0, 1.0)),),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        [AttentionOptions()],
        [AttentionOptions(sinks=(0.5, 1.0, 0.0, -1.0), scale=0.3)],
        [AttentionOptions(), AttentionOptions(sliding_window_tokens=4)],
    ],
    ids=["plain", "sinks", "in turn"],
)
def test_one_call_gives_the_bits_of_two(layout: str, options: list[AttentionOptions]) -> None:
    counting = Counting()
    bound, rig = outputs(counting.kernels, LAYOUTS[layout], options)
    apart = with_operations(CpuKernels(1))
    wanted, other = outputs(apart, LAYOUTS[layout], options)
    assert all(torch.equal(a, b) for a, b in zip(bound, wanted, strict=True))
    assert rig.snapshot() == other.snapshot()
    for name in ("num_written_tokens", "num_attention_tokens", "kernel_bytes"):
        assert getattr(rig.executor.counters, name) == getattr(other.executor.counters, name)
    assert rig.executor.counters.kernel_s.keys() == {"write", "attention"}
    # The prompt is checked, and what differs from the call before in more than its tokens' number.
    num_checked = 1 if len(options) == 1 else NUM_DECODED + 1
    assert counting.num_calls == num_checked * len(LAYERS)


def test_a_layer_is_bound_for_one_token_and_for_several() -> None:
    """The stride of a single token may be any number, and is of no use for several."""
    counting = Counting()
    rig = Rig(kernels=counting.kernels)
    blocks = [set_blocks(i, [(4 * i - 4, 1)]) for i in PROMPTS]
    for number in range(1, 7):
        spans = [span(i, number - 1, 1) for i in PROMPTS]
        is_single = number % 2 == 0
        changes = blocks if number == 1 else []
        if is_single:
            spans = spans[:1]
        elif number > 1:
            spans = [span(1, number - 1, 1), span(2, (number - 1) // 2, 1)]
        rig.start(number, changes=changes, spans=spans)
        for layer in LAYERS:
            query, key, value = (tokens(len(spans), n, seed=number) for n in (4, 2, 2))
            if is_single:
                query = query.as_strided(query.shape, (7, *query.stride()[1:]))
            assert (
                rig.executor.layer(1, layer, query, key, value, **of_latest(rig.executor))
                is not None
            )
        assert rig.executor.receipt(1) is not None
    assert counting.num_calls == 2 * len(LAYERS)
    rig.executor.check_integrity()


@pytest.fixture
def decoding() -> Rig:
    """Plan 3 decodes the token after one that was decoded the same way."""
    rig = Rig()
    rig.admit(num_tokens=10)
    rig.run(2, spans=[span(1, 10, 1)])
    rig.start(3, spans=[span(1, 11, 1)])
    return rig


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"query": tokens(1, 4).bfloat16()}, "query"),
        ({"query": tokens(1, 3)}, "query"),
        ({"query": tokens(2, 4)}, "query"),
        ({"key": tokens(1).double()}, "key"),
        ({"key": tokens(1)[..., ::2]}, "key"),
        ({"value": tokens(2)}, "value"),
        ({"key": tokens(2), "value": tokens(2)}, "key"),
        ({"value": torch.empty(1, 2, 16, device="meta")}, "value"),
        ({"key": tokens(1).to_sparse()}, "key"),
        ({"options": AttentionOptions(sinks=(1.0,))}, "options.sinks"),
    ],
)
def test_tensors_that_differ_from_those_checked_are_checked(
    decoding: Rig, change: dict[str, Any], field: str
) -> None:
    given = {"query": tokens(1, 4), "key": tokens(1), "value": tokens(1), **change}
    with decoding.refuses(InvalidRequestError, field):
        decoding.executor.layer(1, 0, **given, **of_latest(decoding.executor))


def test_a_bound_layer_does_not_write_a_block_that_was_published(decoding: Rig) -> None:
    decoding.publish(1)
    with decoding.refuses(BlockNotWritableError, "plan.spans.sequence_ids[0]"):
        decoding.executor.layer(
            1, 0, tokens(1, 4), tokens(1), tokens(1), **of_latest(decoding.executor)
        )


def test_a_bound_layer_does_not_look_behind_what_was_trimmed() -> None:
    """The options are those that were bound when nothing was trimmed yet."""
    group = replace(LAYOUT.groups[0], sliding_window_tokens=8)
    rig = Rig(layout=replace(LAYOUT, groups=(group,)))
    wide = AttentionOptions(sliding_window_tokens=16)
    given = (tokens(1, 4), tokens(1), tokens(1))
    rig.admit(num_tokens=10)
    for number in (2, 3):
        rig.start(number, spans=[span(1, 8 + number, 1)])
        for layer in LAYERS:
            rig.executor.layer(1, layer, *given, options=wide, **of_latest(rig.executor))
    rig.start(4, changes=[trim(1, 1)], spans=[span(1, 15, 1)])
    named = PlanLayer(1, 0, 4, field="in.")
    with rig.refuses(InvalidRequestError, "in.options.sliding_window_tokens"):
        rig.executor.layer_runner.run(named, given, wide)
