"""A long attention call in slices gives the bits of the whole, and other commands come between."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.execution.plan_runner import PlanLayer
from data_plane.execution.shards import row_slices
from data_plane.execution.shards.row_slices import SliceSizes
from data_plane.kernels.arguments import HostLengths
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError, SessionExpiredError, StaleGenerationError
from kvplane.slices import run_to_end
from kvplane.tensor import Tensor
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import set_blocks, span, tokens

FIRST = PlanLayer(1, 0, 1)
SPANS = [(0, 300), (40, 56), (8, 1), (3, 200)]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Four sequences in one plan, computed once."""
    monkeypatch.setattr(row_slices, "_FEW_ROWS", 0)
    rig = Rig(num_device_blocks=100)
    changes, first = [], 0
    for i, (position, num) in enumerate(SPANS):
        num_blocks = -(-(position + num) // 8)
        changes.append(set_blocks(i + 1, [(first + j, 1) for j in range(num_blocks)]))
        first += num_blocks
    spans = [span(i + 1, position, num) for i, (position, num) in enumerate(SPANS)]
    for tier in (rig.executor.pools.device_tier,):
        tier.copy_(torch.randn(tier.shape, generator=torch.Generator().manual_seed(7)))
    rig.start(1, *changes, *spans)
    rig.executor.layer_runner.slice_s = 1e-9  # as short as slices get
    return rig


NUM_TOKENS = sum(num for _, num in SPANS)
TENSORS = tokens(NUM_TOKENS, 4), tokens(NUM_TOKENS, seed=1), tokens(NUM_TOKENS, seed=2)


RANDOM_BLOCKS = torch.rand(4, 4, 19, generator=torch.Generator().manual_seed(3)) < 0.3
OPTIONS = {
    "plain": AttentionOptions(),
    "a mask of each sequence": AttentionOptions(
        block_pattern=BlockPattern(16, 1), seen_blocks=Tensor.from_array(RANDOM_BLOCKS.byte())
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_slices_give_the_bits_of_the_whole(rig: Rig, options: AttentionOptions) -> None:
    slices = rig.executor.layer_runner.run_slices(FIRST, TENSORS, options)
    assert sum(1 for _ in slices) >= NUM_TOKENS // 64 - 2
    only_attends = TENSORS[0], None, None
    in_slices = run_to_end(rig.executor.layer_runner.run_slices(FIRST, only_attends, options))
    assert in_slices is not None
    for tensors in (only_attends, TENSORS):
        whole = rig.executor.layer(1, 0, *tensors, options=options, **of_latest(rig.executor))
        assert whole is not None
        assert torch.equal(in_slices, whole)


def test_layers_of_other_masks_are_checked_anew() -> None:
    """Tensors and options are the same as in the plan before, but not the number of sequences."""
    rig = Rig()
    options = AttentionOptions(
        block_pattern=BlockPattern(16, 1), seen_blocks=Tensor.zeros("uint8", (1, 4, 1))
    )
    rows = tokens(2, 4), tokens(2, seed=1), tokens(2, seed=2)
    rig.start(1, set_blocks(1, [(0, 1)]), set_blocks(2, [(1, 1)]), span(1, 0, 2))
    for layer in rig.executor.layers:
        assert rig.run_layer(layer, *rows, options=options) is not None
    rig.start(2, span(1, 2, 1), span(2, 0, 1))
    with rig.refuses(InvalidRequestError, "options.seen_blocks"):
        rig.run_layer(0, *rows, options=options)


def test_a_session_that_ends_between_slices_computes_no_further(rig: Rig) -> None:
    slices = rig.executor.layer_runner.run_slices(FIRST, TENSORS, AttentionOptions())
    next(slices)
    rig.fence(1)
    with pytest.raises(SessionExpiredError):
        next(slices)


def test_blocks_that_are_taken_between_slices_are_not_read(rig: Rig) -> None:
    rig.open(2)
    slices = rig.executor.layer_runner.run_slices(FIRST, TENSORS, AttentionOptions())
    next(slices)
    rig.start(1, set_blocks(1, [(0, 2)]), session_id=2)
    with pytest.raises(StaleGenerationError):
        next(slices)


def test_slices_follow_from_how_long_calls_took() -> None:
    lengths = HostLengths(np.array([0, 4096]), np.array([4096]))
    sizes = SliceSizes()
    few = [*sizes.slices(lengths, 1.0)]
    many = [*sizes.slices(lengths, 0.01)]
    assert len(few) == 1
    assert len(many) > 8
    assert [row for rows in many for row in rows] == [*range(4096)]
    assert len(many[0]) > 4 * len(many[-2]), "later rows attend to more positions"
    assert [*sizes.slices(HostLengths(np.array([0, 1]), np.array([9])), 1e-9)] == [range(1)]
