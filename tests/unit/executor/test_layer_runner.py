"""Layers whose tensors are as transformers has them come to what layers of single tokens do. They
are one native call where tensors like these were checked, and are checked where they were not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.bound_layers import BoundLayers
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    BlockNotWritableError,
    InvalidRequestError,
    KvplaneError,
    PlanOutOfOrderError,
    SessionExpiredError,
    StaleGenerationError,
)
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import publications, set_blocks, span, tokens

PLAIN = AttentionOptions()
HEADS, KV_HEADS, SIZE = 4, 2, 16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Twins:
    """Two executors that are given the same plans: layers of the one are called as by an engine in
    its process, and those of the other with kernels that bind no layers. ``num_checked``: layers of
    the first that were checked, and not bound already.
    """

    def __init__(self) -> None:
        kernels = CpuKernels(1)
        layers: BoundLayers = kernels.bound_layers()
        attend = kernels.paged_attention
        self.num_checked = 0

        def counted(arguments: AttentionArguments, **there: Any) -> torch.Tensor:
            self.num_checked += 1
            return attend(arguments, **there)

        counting = with_operations(kernels, paged_attention=counted, bound_layers=lambda: layers)
        self.rig, self.other = Rig(kernels=counting), Rig(kernels=with_operations(CpuKernels(1)))
        self.rigs = self.rig, self.other

    def start(self, number: int, **plan: Any) -> None:
        for rig in self.rigs:
            rig.start(number, **plan)

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

    def layer(self, layer: int, tensors: Tensors) -> torch.Tensor:
        """The output, of [num_rows, num_columns, heads, size]."""
        query = tensors[0]
        out = self.call(tensors, layer)
        assert out.shape == (query.shape[0], query.shape[2], HEADS, SIZE)
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        named = of_latest(self.other.executor)
        wanted = self.other.executor.layer(1, layer, *rows, **named)
        assert wanted is not None
        assert torch.equal(out, wanted.view(out.shape))
        return out

    def step(self, num_rows: int, num_columns: int, seed: int, **how: Any) -> None:
        for layer in LAYERS:
            self.layer(layer, made(num_rows, num_columns, seed + layer, **how))

    def check(self) -> None:
        """Memory, receipts and counts are the same."""
        first, second = (rig.executor for rig in self.rigs)
        assert torch.equal(first.pools.device_tier, second.pools.device_tier)
        receipts = [executor.receipt(1) for executor in (first, second)]
        assert [receipt is None for receipt in receipts] in ([True, True], [False, False])
        for name in ("num_written_tokens", "num_attention_tokens", "kernel_bytes"):
            assert getattr(first.counters, name) == getattr(second.counters, name), name
        for kind in ("write", "attention"):
            assert first.counters.kernel_s[kind] > 0
        for rig in self.rigs:
            rig.executor.check_integrity()


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
def twins() -> Iterator[Twins]:
    twins = Twins()
    yield twins
    for rig in twins.rigs:
        rig.executor.check_integrity()


BLOCKS = {1: [(0, 1), (1, 1)], 2: [(2, 1), (3, 1)], 3: [(4, 1), (5, 1)]}


def prompts(twins: Twins) -> None:
    changes = [set_blocks(i, blocks) for i, blocks in BLOCKS.items()]
    twins.start(1, changes=changes, spans=[span(1, 0, 5), span(2, 0, 3), span(3, 0, 2)])
    twins.step(1, 10, seed=1)
    twins.check()
    assert twins.num_checked == len(LAYERS)


def decode(twins: Twins, number: int, first: Sequence[int]) -> None:
    """Begin a plan of one token of each of the first sequences."""
    spans = [span(i + 1, position, 1) for i, position in enumerate(first)]
    twins.start(number, previous=number - 1, spans=spans)


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
    twins.start(2, previous=1, spans=[span(1, 5, 4), span(2, 3, 2), span(3, 2, 4)])
    for index in range(4):
        num = twins.begin_pass(index)
        twins.step(1, num, seed=30 + index)
    twins.check()
    assert twins.num_checked == len(LAYERS)


def test_tensors_that_cannot_be_read_as_rows_are_copied(twins: Twins) -> None:
    prompts(twins)
    for i in range(3):
        spans = [span(1, 5 + 2 * i, 2), span(2, 3 + 2 * i, 2)]
        twins.start(2 + i, previous=1 + i, spans=spans)
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


def refused(
    twins: Twins,
    tensors: Tensors,
    error: type[KvplaneError],
    layer: int = 0,
    options: AttentionOptions = PLAIN,
) -> None:
    """A layer writes nothing."""
    before = twins.rig.executor.pools.device_tier.clone()
    with pytest.raises(error):
        twins.call(tensors, layer, options)
    assert torch.equal(twins.rig.executor.pools.device_tier, before)
    assert not twins.num_checked, "no kernel was called"


def test_a_session_that_has_ended_computes_nothing(twins: Twins) -> None:
    tensors = bound(twins)
    twins.rig.fence(1)
    refused(twins, tensors, SessionExpiredError)


def test_nothing_is_written_to_a_block_that_was_published_since(twins: Twins) -> None:
    tensors = bound(twins)
    twins.rig.executor.publish(publications((0, 1)))
    refused(twins, tensors, BlockNotWritableError)


def test_what_is_published_elsewhere_is_no_hindrance(twins: Twins) -> None:
    bound(twins)
    for rig in twins.rigs:
        rig.executor.publish(publications((2, 1)))
    twins.step(1, 1, seed=40)
    twins.check()
    assert not twins.num_checked


def test_a_table_that_another_session_has_taken_blocks_of_is_not_read(twins: Twins) -> None:
    tensors = bound(twins)
    twins.rig.open(2)
    twins.rig.run(1, 2, changes=[set_blocks(1, [(0, 2)])], spans=[span(1, 0, 3)])
    twins.num_checked = 0
    refused(twins, tensors, StaleGenerationError)


def test_layers_come_in_order(twins: Twins) -> None:
    tensors = bound(twins)
    refused(twins, tensors, InvalidRequestError, layer=1)
    twins.call(tensors)
    twins.call(tensors, 1)
    assert not twins.num_checked


def test_a_layer_of_another_plan_writes_nothing(twins: Twins) -> None:
    tensors = bound(twins)
    twins.step(1, 1, seed=40)
    twins.rig.start(5, previous=4, spans=[span(1, 8, 1)])
    refused(twins, tensors, PlanOutOfOrderError)
    twins.other.start(5, previous=4, spans=[span(1, 8, 1)])
    twins.call(tensors)


def test_a_layer_of_another_pass_writes_nothing(twins: Twins) -> None:
    tensors = bound(twins)
    twins.step(1, 1, seed=40)
    twins.start(5, previous=4, spans=[span(1, 8, 2)])
    twins.begin_pass(0)
    twins.step(1, 1, seed=50)
    twins.rig.executor.begin_pass(1, 1)
    refused(twins, tensors, PlanOutOfOrderError)
    twins.other.executor.begin_pass(1, 1)
    twins.call(tensors)


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
    }


@pytest.mark.parametrize("name", other_tensors())
def test_what_was_not_checked_is_checked(twins: Twins, name: str) -> None:
    tensors = bound(twins)
    others, options = other_tensors()[name]
    refused(twins, others, InvalidRequestError, options=options)
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
    twins.rig.start(5, previous=4, resync=True, changes=[set_blocks(1, [(6, 1)])], spans=[])
    assert counters.num_written_tokens == before + 1
