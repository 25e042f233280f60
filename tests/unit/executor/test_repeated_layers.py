"""Layers called step after step with tensors as transformers has them come to what any others do,
and whatever is not as in the step before goes their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from data_plane.execution.repeated_layers import RepeatedLayers
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
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import publications, set_blocks, span, tokens

PLAIN = AttentionOptions()
HEADS, KV_HEADS, SIZE = 4, 2, 16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Twins:
    """Two executors that are given the same plans: layers of the one are called as by an engine in
    its process, and those of the other one by one.
    """

    def __init__(self) -> None:
        self.rig, self.other = Rig(), Rig()
        self.rigs = self.rig, self.other
        made = self.rig.executor.repeated_layers(1)
        assert made is not None
        self.repeated: RepeatedLayers = made
        self.num_repeated = 0

    def start(self, number: int, **plan: Any) -> None:
        for rig in self.rigs:
            rig.start(number, **plan)
        self.repeated.begin(**of_latest(self.rig.executor))

    def begin_pass(self, index: int) -> int:
        nums = [rig.executor.begin_pass(1, index) for rig in self.rigs]
        self.repeated.begin(**of_latest(self.rig.executor))
        return nums[0]

    def layer(
        self, layer: int, tensors: Tensors, options: AttentionOptions = PLAIN
    ) -> torch.Tensor:
        """The output, of [num_rows, num_columns, heads, size]."""
        query, key, value = tensors
        out = self.repeated.layer(layer, query, key, value, options)
        self.num_repeated += out is not None
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        wanted = self.other.executor.layer(
            1, layer, *rows, options=options, **of_latest(self.other.executor)
        )
        if out is None:
            out = self.rig.executor.layer(
                1, layer, *rows, options=options, **of_latest(self.rig.executor)
            )
            assert out is not None
            out = out.view(query.shape[0], query.shape[2], HEADS, SIZE)
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


def decode(twins: Twins, number: int, first: Sequence[int]) -> None:
    """Begin a plan of one token of each of the first sequences."""
    spans = [span(i + 1, position, 1) for i, position in enumerate(first)]
    twins.start(number, previous=number - 1, spans=spans)


def test_steps_come_to_what_single_layers_do(twins: Twins) -> None:
    prompts(twins)
    assert twins.num_repeated == 0, "nothing was bound yet"
    for i in range(3):  # one sequence, which is the row
        decode(twins, 2 + i, [5 + i])
        twins.step(1, 1, seed=10 + i)
        twins.check()
    assert twins.num_repeated == 2 * len(LAYERS), "all but the first step of one token"
    for i in range(3):  # three that share a row
        decode(twins, 5 + i, [8 + i, 3 + i, 2 + i])
        twins.step(1, 3, seed=20 + i)
        twins.check()
    assert twins.num_repeated >= 4 * len(LAYERS)


def test_a_batch_of_rows_comes_to_the_same(twins: Twins) -> None:
    prompts(twins)
    for i in range(4):
        decode(twins, 2 + i, [5 + i, 3 + i, 2 + i])
        twins.step(3, 1, seed=10 + i)
    twins.check()
    assert twins.num_repeated >= 3 * len(LAYERS)


def test_passes_come_to_the_same(twins: Twins) -> None:
    prompts(twins)
    twins.start(2, previous=1, spans=[span(1, 5, 4), span(2, 3, 2), span(3, 2, 4)])
    for index in range(4):
        num = twins.begin_pass(index)
        twins.step(1, num, seed=30 + index)
    twins.check()
    assert twins.num_repeated >= 3 * len(LAYERS)


def test_tensors_that_cannot_be_read_as_rows_are_copied_as_ever(twins: Twins) -> None:
    prompts(twins)
    for i in range(3):
        decode(twins, 2 + i, [5 + i, 3 + i, 2 + i])
        twins.step(1, 3, seed=10 + i, heads_first=True)
    twins.check()


def known(twins: Twins) -> Callable[[], torch.Tensor | None]:
    """All layers are known, and the next plan has begun; returns the call of its first layer."""
    prompts(twins)
    for i in range(2):
        decode(twins, 2 + i, [5 + i])
        twins.step(1, 1, seed=10 + i)
    assert twins.num_repeated == len(LAYERS)
    decode(twins, 4, [7])
    return lambda: twins.repeated.layer(0, *made(1, 1, 40), PLAIN)


def refused(twins: Twins, error: type[KvplaneError], layer: int = 0) -> None:
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in made(1, 1, 40)]
    before = twins.rig.executor.pools.device_tier.clone()
    with pytest.raises(error):
        twins.rig.executor.layer(1, layer, *rows, **of_latest(twins.rig.executor))
    assert torch.equal(twins.rig.executor.pools.device_tier, before)


def test_a_session_that_has_ended_computes_nothing(twins: Twins) -> None:
    call = known(twins)
    twins.rig.fence(1)
    assert call() is None
    refused(twins, SessionExpiredError)


def test_nothing_is_written_to_a_block_that_was_published_since(twins: Twins) -> None:
    call = known(twins)
    twins.rig.executor.publish(publications((0, 1)))
    assert call() is None
    refused(twins, BlockNotWritableError)


def test_what_is_published_elsewhere_is_no_hindrance(twins: Twins) -> None:
    known(twins)
    for rig in twins.rigs:
        rig.executor.publish(publications((2, 1)))
    twins.step(1, 1, seed=40)
    twins.check()
    assert twins.num_repeated == 2 * len(LAYERS) - 1, "the first layer was checked again"


def test_a_table_that_another_session_has_taken_blocks_of_is_not_read(twins: Twins) -> None:
    call = known(twins)
    twins.rig.open(2)
    twins.rig.run(1, 2, changes=[set_blocks(1, [(0, 2)])], spans=[span(1, 0, 3)])
    assert call() is None
    refused(twins, StaleGenerationError)


def test_layers_come_in_order_and_once(twins: Twins) -> None:
    call = known(twins)
    assert twins.repeated.layer(1, *made(1, 1, 41), PLAIN) is None
    refused(twins, InvalidRequestError, layer=1)
    assert call() is not None
    assert call() is None, "it was written"


def test_a_plan_that_was_not_begun_here_goes_another_way(twins: Twins) -> None:
    call = known(twins)
    twins.step(1, 1, seed=40)
    assert call() is None, "the plan has run"
    for rig in twins.rigs:
        rig.start(5, previous=4, spans=[span(1, 8, 1)])
    assert call() is None
    twins.repeated.begin(**of_latest(twins.rig.executor))
    assert call() is not None


def test_a_pass_that_was_not_begun_here_goes_another_way(twins: Twins) -> None:
    known(twins)
    twins.step(1, 1, seed=40)
    twins.start(5, previous=4, spans=[span(1, 8, 2)])
    twins.begin_pass(0)
    twins.step(1, 1, seed=50)
    for rig in twins.rigs:
        rig.executor.begin_pass(1, 1)
    assert twins.repeated.layer(0, *made(1, 1, 60), PLAIN) is None
    with pytest.raises(PlanOutOfOrderError):
        twins.rig.start(6, previous=5, spans=[span(1, 10, 1)])


def other_tensors() -> dict[str, tuple[Tensors, AttentionOptions]]:
    query, key, value = made(1, 1, 40)
    return {
        "other options": ((query, key, value), AttentionOptions(scale=0.5)),
        "another type": ((query.half(), key, value), PLAIN),
        "keys of another type": ((query, key.half(), value), PLAIN),
        "values of another type": ((query, key, value.double()), PLAIN),
        "more heads": ((query.repeat(1, 2, 1, 1), key, value), PLAIN),
        "more tokens": (made(1, 2, 40), PLAIN),
        "more keys": ((query, *made(1, 2, 40)[1:]), PLAIN),
        "sizes that are not next to one another": (
            (query, torch.zeros(1, 2, 1, 32)[..., ::2], value),
            PLAIN,
        ),
        "values on another device": ((query, key, value.to("meta")), PLAIN),
        "no rows": ((query[0], key[0], value[0]), PLAIN),
    }


@pytest.mark.parametrize("name", other_tensors())
def test_what_was_not_checked_goes_another_way(twins: Twins, name: str) -> None:
    call = known(twins)
    tensors, options = other_tensors()[name]
    before = twins.rig.executor.pools.device_tier.clone()
    assert twins.repeated.layer(0, *tensors, options) is None
    assert torch.equal(twins.rig.executor.pools.device_tier, before)
    assert call() is not None, "those that were checked are still known"


def test_a_layer_of_another_number_is_none_of_ours(twins: Twins) -> None:
    known(twins)
    assert twins.repeated.layer(7, *made(1, 1, 40), PLAIN) is None


def test_outputs_are_where_the_kernels_are(twins: Twins) -> None:
    known(twins)
    tensors = made(1, 1, 40)
    with torch.device("meta"):
        out = twins.repeated.layer(0, *tensors, PLAIN)
    assert out is not None
    assert out.is_cpu


def test_layers_are_counted_though_a_plan_ends_within(twins: Twins) -> None:
    call = known(twins)
    counters = twins.rig.executor.counters
    before = counters.num_written_tokens
    assert call() is not None
    twins.rig.start(5, previous=4, resync=True, changes=[set_blocks(1, [(6, 1)])], spans=[])
    twins.repeated.begin(**of_latest(twins.rig.executor))
    assert counters.num_written_tokens == before + 1
