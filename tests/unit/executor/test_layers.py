"""Layers whose tensors are as transformers has them come to what layers of single tokens do. They
are one native call where tensors like these were checked, and are checked where they were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_plane.execution.layers import layer_index, layer_range
from data_plane.execution.plan_runner import PlanLayer
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.bound_layers import BoundLayers
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    InvalidRequestError,
)
from kvplane.layout import Layout
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    LAYOUT,
    Part,
    publications,
    set_blocks,
    span,
    tokens,
    trim,
)

PLAIN = AttentionOptions()
HEADS, KV_HEADS, SIZE = 4, 2, 16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Counting:
    """Kernels that count the layers that they check because they are not bound already."""

    def __init__(self) -> None:
        self.num_checked = 0
        kernels = CpuKernels(1)
        layers: BoundLayers = kernels.bound_layers()
        attend = kernels.paged_attention

        def counted(arguments: AttentionArguments, **there: Any) -> torch.Tensor:
            self.num_checked += 1
            return attend(arguments, **there)

        self.kernels = with_operations(
            kernels, paged_attention=counted, bound_layers=lambda: layers
        )


class Twins(Counting):
    """Two executors that are given the same plans: layers of the one are called as by an engine in
    its process, and those of the other with kernels that bind no layers.
    """

    def __init__(self, layout: Layout = LAYOUT) -> None:
        super().__init__()
        apart = with_operations(CpuKernels(1))  # which bind no layers
        self.rig, self.other = (Rig(kernels=each, layout=layout) for each in (self.kernels, apart))
        self.rigs = self.rig, self.other
        self.dtype = getattr(torch, layout.dtype)

    def start(self, number: int, *parts: Part, **fields: Any) -> None:
        for rig in self.rigs:
            rig.start(number, *parts, **fields)

    def begin_pass(self, index: int) -> int:
        first, _ = (rig.executor.begin_pass(1, index) for rig in self.rigs)
        return first

    def call(
        self, tensors: Tensors, layer: int = 0, options: AttentionOptions = PLAIN
    ) -> torch.Tensor:
        """A layer of the first executor, in the plan and pass that the second one is in too."""
        named = of_latest(self.other.executor)
        out = self.rig.executor.layer(1, layer, *tensors, options=options, **named)
        assert out is not None
        return out

    def layer(
        self, layer: int, tensors: Tensors, options: AttentionOptions = PLAIN
    ) -> torch.Tensor:
        """The output, of [num_rows, num_columns, heads, size]."""
        query = tensors[0]
        out = self.call(tensors, layer, options)
        assert out.shape == (query.shape[0], query.shape[2], HEADS, SIZE)
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        named = of_latest(self.other.executor)
        wanted = self.other.executor.layer(1, layer, *rows, options=options, **named)
        assert wanted is not None
        assert torch.equal(out, wanted.view(out.shape))
        return out

    def step(
        self,
        num_rows: int,
        num_columns: int,
        seed: int,
        options: AttentionOptions = PLAIN,
        **how: Any,
    ) -> None:
        for layer in LAYERS:
            tensors = made(num_rows, num_columns, seed + layer, **how)
            query, key, value = (tensor.to(self.dtype) for tensor in tensors)
            self.layer(layer, (query, key, value), options)

    def check(self) -> None:
        """Memory, receipts and counts are the same."""
        first, second = (rig.executor for rig in self.rigs)
        assert torch.equal(first.pools.device_tier, second.pools.device_tier)
        receipts = [executor.receipt(1) for executor in (first, second)]
        assert [receipt is None for receipt in receipts] in ([True, True], [False, False])
        for name in ("num_written_tokens", "num_attention_tokens", "kernel_bytes"):
            assert getattr(first.counters, name) == getattr(second.counters, name), name
        assert first.counters.kernel_s.keys() == {"write", "attention"}
        assert min(first.counters.kernel_s.values()) > 0


def made(num_rows: int, num_columns: int, seed: int, *, heads_first: bool = False) -> Tensors:
    """Query, key and value as models make them: views of [num_rows, num_columns, heads, size]
    unless ``heads_first``.
    """

    def one(heads: int, seed: int) -> torch.Tensor:
        of_tokens = tokens(num_rows * num_columns, heads, seed=seed)
        there = of_tokens.view(num_rows, num_columns, heads, SIZE).transpose(1, 2)
        return there.contiguous() if heads_first else there

    return one(HEADS, seed), one(KV_HEADS, seed + 100), one(KV_HEADS, seed + 200)


@pytest.fixture
def twins() -> Twins:
    return Twins()


BLOCKS = {1: [(0, 1), (1, 1)], 2: [(2, 1), (3, 1)], 3: [(4, 1), (5, 1)]}


def prompts(twins: Twins, options: AttentionOptions = PLAIN) -> None:
    changes = [set_blocks(i, blocks) for i, blocks in BLOCKS.items()]
    twins.start(1, *changes, span(1, 0, 5), span(2, 0, 3), span(3, 0, 2))
    twins.step(1, 10, 1, options)
    twins.check()
    assert twins.num_checked == len(LAYERS)


def decode(twins: Twins, number: int, first: Sequence[int]) -> None:
    """Begin a plan of one token of each of the first sequences."""
    spans = [span(i + 1, position, 1) for i, position in enumerate(first)]
    twins.start(number, *spans, previous=number - 1)


def test_steps_come_to_what_single_layers_do(twins: Twins) -> None:
    prompts(twins)
    for i in range(3):  # one sequence, which is the row
        decode(twins, 2 + i, [5 + i])
        twins.step(1, 1, seed=10 + i)
        twins.check()
    assert twins.num_checked == 2 * len(LAYERS), "the first step of one token was checked"
    for i in range(3):  # three that share a row
        decode(twins, 5 + i, [8 + i, 3 + i, 2 + i])
        twins.step(1, 3, seed=20 + i)
        twins.check()
    assert twins.num_checked == 2 * len(LAYERS), "the prompt was of several tokens too"


def test_a_batch_of_rows_comes_to_the_same(twins: Twins) -> None:
    prompts(twins)
    for i in range(4):
        decode(twins, 2 + i, [5 + i, 3 + i, 2 + i])
        twins.step(3, 1, seed=10 + i)
    twins.check()
    assert twins.num_checked == len(LAYERS)


def test_passes_come_to_the_same(twins: Twins) -> None:
    prompts(twins)
    twins.start(2, span(1, 5, 4), span(2, 3, 2), span(3, 2, 4))
    for index in range(4):
        num = twins.begin_pass(index)
        twins.step(1, num, seed=30 + index)
    twins.check()
    assert twins.num_checked == len(LAYERS)


def test_tensors_that_cannot_be_read_as_rows_are_copied(twins: Twins) -> None:
    prompts(twins)
    for i in range(3):
        spans = [span(1, 5 + 2 * i, 2), span(2, 3 + 2 * i, 2)]
        twins.start(2 + i, *spans, previous=1 + i)
        twins.step(2, 2, seed=10 + i, heads_first=True)
    twins.check()
    assert twins.num_checked == len(LAYERS), "the copies are tensors like the prompt's"


def bound(twins: Twins) -> Tensors:
    """All layers are bound for one token, and a plan of one has begun; its tensors."""
    prompts(twins)
    for i in range(2):
        decode(twins, 2 + i, [5 + i])
        twins.step(1, 1, seed=10 + i)
    decode(twins, 4, [7])
    twins.num_checked = 0
    return made(1, 1, 40)


def test_what_is_published_elsewhere_is_no_hindrance(twins: Twins) -> None:
    bound(twins)
    for rig in twins.rigs:
        rig.executor.publish(publications((2, 1)))
    twins.step(1, 1, seed=40)
    twins.check()
    assert not twins.num_checked


def other_tensors() -> dict[str, tuple[Tensors, AttentionOptions]]:
    query, key, value = made(1, 1, 40)
    return {
        "more slopes than heads": ((query, key, value), AttentionOptions(alibi_slopes=(1.0,) * 9)),
        "another type": ((query.half(), key, value), PLAIN),
        "keys of another type": ((query, key.half(), value), PLAIN),
        "values of another type": ((query, key, value.double()), PLAIN),
        "heads that do not share keys evenly": ((query[:, :3], key, value), PLAIN),
        "more tokens": (made(1, 2, 40), PLAIN),
        "more keys": ((query, *made(1, 2, 40)[1:]), PLAIN),
        "sizes that are not next to one another": (
            (query, torch.zeros(1, 2, 1, 32)[..., ::2], value),
            PLAIN,
        ),
        "values on another device": ((query, key, value.to("meta")), PLAIN),
        "no columns": ((query[0], key[0], value[0]), PLAIN),
        "more keys, of single tokens": ((tokens(1, 4), tokens(2), tokens(2)), PLAIN),
        "more values, of single tokens": ((tokens(1, 4), tokens(1), tokens(2)), PLAIN),
        "keys that are sparse": ((tokens(1, 4), tokens(1).to_sparse(), tokens(1)), PLAIN),
    }


@pytest.mark.parametrize("name", other_tensors())
def test_what_was_not_checked_is_checked(twins: Twins, name: str) -> None:
    tensors = bound(twins)
    others, options = other_tensors()[name]
    before = twins.rig.executor.pools.device_tier.clone()
    with pytest.raises(InvalidRequestError):
        twins.call(others, options=options)
    assert torch.equal(twins.rig.executor.pools.device_tier, before)
    twins.call(tensors)
    assert not twins.num_checked, "those that were checked are still bound"


def test_other_options_are_other_attention(twins: Twins) -> None:
    tensors = bound(twins)
    plain = twins.call(tensors)
    other = twins.call(tensors, options=AttentionOptions(scale=0.5))
    assert not torch.equal(plain, other)
    assert torch.equal(twins.call(tensors), plain)


def test_outputs_are_where_the_kernels_are(twins: Twins) -> None:
    tensors = bound(twins)
    with torch.device("meta"):
        out = twins.call(tensors)
    assert out.is_cpu


def test_layers_are_counted_though_a_plan_ends_within(twins: Twins) -> None:
    tensors = bound(twins)
    counters = twins.rig.executor.counters
    before = counters.num_written_tokens
    twins.call(tensors)
    twins.rig.start(5, set_blocks(1, [(6, 1)]), resync=True)
    assert counters.num_written_tokens == before + 1


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
    """With options in turn, each layer is checked that differs from the call before in them."""
    twins, num_steps = Twins(LAYOUTS[layout]), 6
    prompts(twins, options[0])
    for i in range(num_steps):
        decode(twins, 2 + i, [5 + i, 3 + i, 2 + i])
        twins.step(1, 3, 10 + i, options[(i + 1) % len(options)])
        twins.check()
    num_checked = 1 if len(options) == 1 else num_steps + 1
    assert twins.num_checked == num_checked * len(LAYERS)


def test_a_layer_is_bound_for_one_token_and_for_several() -> None:
    """The stride of a single token may be any number, and is of no use for several."""
    counting = Counting()
    rig = Rig(kernels=counting.kernels)
    blocks = [set_blocks(i, [(4 * i - 4, 1)]) for i in (1, 2)]
    for number in range(1, 7):
        spans = [span(i, number - 1, 1) for i in (1, 2)]
        is_single = number % 2 == 0
        changes = blocks if number == 1 else []
        if is_single:
            spans = spans[:1]
        elif number > 1:
            spans = [span(1, number - 1, 1), span(2, (number - 1) // 2, 1)]
        rig.start(number, *changes, *spans)
        for layer in LAYERS:
            query, key, value = (tokens(len(spans), n, seed=number) for n in (4, 2, 2))
            if is_single:
                query = query.as_strided(query.shape, (7, *query.stride()[1:]))
            assert (
                rig.executor.layer(1, layer, query, key, value, **of_latest(rig.executor))
                is not None
            )
        assert rig.executor.receipt(1) is not None
    assert counting.num_checked == 2 * len(LAYERS)


def test_a_bound_layer_does_not_look_behind_what_was_trimmed() -> None:
    """The options are those that were bound when nothing was trimmed yet."""
    group = replace(LAYOUT.groups[0], sliding_window_tokens=8)
    rig = Rig(layout=replace(LAYOUT, groups=(group,)))
    wide = AttentionOptions(sliding_window_tokens=16)
    given = (tokens(1, 4), tokens(1), tokens(1))
    rig.admit(num_tokens=10)
    for number in (2, 3):
        rig.start(number, span(1, 8 + number, 1))
        for layer in LAYERS:
            rig.executor.layer(1, layer, *given, options=wide, **of_latest(rig.executor))
    rig.start(4, trim(1, 1), span(1, 15, 1))
    named = PlanLayer(1, 0, 4, field="in.")
    with rig.refuses(InvalidRequestError, "in.options.sliding_window_tokens"):
        rig.executor.layer_runner.run(named, given, wide)


HELD = (4, 5, 6)


def test_layers_are_counted_in_the_shard() -> None:
    assert layer_index(HELD, 5) == 1
    assert list(layer_range(HELD, 0, 0)) == [0, 1, 2]
    assert list(layer_range(HELD, 5, 2)) == [1, 2]


@pytest.mark.parametrize(
    ("first", "num", "field"),
    [
        (5, 0, "first_layer"),
        (3, 1, "first_layer"),
        (7, 1, "first_layer"),
        (-1, 1, "first_layer"),
        (5, 3, "num_layers"),
        (5, -1, "num_layers"),
    ],
)
def test_a_range_that_the_shard_does_not_hold_is_refused(first: int, num: int, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        layer_range(HELD, first, num)
    assert refused.value.field == field
