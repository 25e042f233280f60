"""Pools of several layer groups in the data plane: each has memory, tables and generations of its
own, and its layers compute what they would in a pool of that group alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from data_plane import Executor
from data_plane.memory.sizing import STEP_TOKENS, fit_blocks, share_blocks
from kvplane.errors import InvalidRequestError, StaleGenerationError
from kvplane.layout import STATE, LayerGroup, Layout
from kvplane.shard import Shard
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    LAYOUT,
    POOL_ID,
    publications,
    ref,
    set_blocks,
    span,
    transfer,
    trim,
)
from tests.helpers.refusals import refused

FULL = LayerGroup("full", (0, 3), 2, 16)
WINDOW = LayerGroup("window", (1, 2, 4), 1, 8, sliding_window_tokens=8)
BOTH = replace(LAYOUT, groups=(FULL, WINDOW))


def rig_of(*groups: LayerGroup, num_device_blocks: int | tuple[int, ...] = 8) -> Rig:
    layout = replace(LAYOUT, groups=groups)
    return Rig(layout=layout, num_device_blocks=num_device_blocks)


def run(rig: Rig, seed: int, num_tokens: int) -> dict[int, torch.Tensor]:
    """The latest plan's output of each layer, whose inputs follow from the layer."""
    outputs = {}
    for layer in rig.executor.layers:
        group = next(g for g in rig.executor.layout.groups if layer in g.layers)
        made = torch.Generator().manual_seed(100 * seed + layer)
        query, key, value = (
            torch.randn(num_tokens, heads, group.head_size, generator=made)
            for heads in (4, group.num_kv_heads, group.num_kv_heads)
        )
        output = rig.run_layer(layer, query, key, value)
        assert output is not None
        outputs[layer] = output.clone()
    return outputs


def test_each_group_computes_what_it_would_alone() -> None:
    prompt, decode = span(1, 0, 20), span(1, 20, 1)
    both = rig_of(FULL, WINDOW, num_device_blocks=(8, 5))
    full, window = rig_of(FULL), rig_of(WINDOW)
    of_full = set_blocks(1, [(5, 1), (1, 1), (7, 1)])
    of_window = set_blocks(1, [(0, 1), (4, 1), (2, 1)])
    grouped = replace(of_window, group=1)
    trimmed = trim(1, 1)
    for number, (changes, spans) in enumerate(
        [
            ({both: [of_full, grouped], full: [of_full], window: [of_window]}, [prompt]),
            ({both: [replace(trimmed, group=1)], full: [], window: [trimmed]}, [decode]),
        ],
        start=1,
    ):
        outputs = {}
        for rig, made in changes.items():
            started = rig.start(number, *made, *spans)
            outputs[rig] = run(rig, number, started.num_tokens)
        assert sorted(outputs[both]) == [0, 1, 2, 3, 4]
        for rig in (full, window):
            assert all(torch.equal(outputs[both][i], output) for i, output in outputs[rig].items())
        assert both.executor.receipt(1) is not None
    blocks, names = both.executor.read_blocks(1, 1, [1], group=1)
    alone, _ = window.executor.read_blocks(1, 1, [1])
    assert torch.equal(blocks, alone)
    assert (names.group, names.indices) == (1, b"\4\0\0\0")
    with pytest.raises(InvalidRequestError):
        both.executor.read_blocks(1, 1, [0], group=1)  # it was trimmed there alone
    assert both.executor.read_blocks(1, 1, range(3))[0].shape[:2] == (2, 3)


def test_blocks_are_copied_inside_their_group() -> None:
    rig = rig_of(FULL, WINDOW)
    full, window = set_blocks(1, [(0, 1)]), set_blocks(1, [(0, 1)], group=1)
    rig.start(1, full, window, span(1, 0, 8))
    run(rig, 1, 8)
    before, _ = rig.executor.read_blocks(1, 1, [0])
    of_window, _ = rig.executor.read_blocks(1, 1, [0], group=1)
    rig.start(
        2,
        *[set_blocks(1, [(2, 1)], tier=HOST, replace=True, group=group) for group in (0, 1)],
        *[replace(transfer(ref(0), ref(2, tier=HOST)), group=group) for group in (0, 1)],
    )
    assert torch.equal(rig.executor.read_blocks(1, 1, [0])[0], before)
    assert torch.equal(rig.executor.read_blocks(1, 1, [0], group=1)[0], of_window)
    tiers = [(b.group, b.tier) for part in rig.executor.report() for b in part.blocks]
    assert tiers == [(0, DEVICE), (0, HOST), (1, DEVICE), (1, HOST)]


def test_generations_of_one_group_are_not_anothers() -> None:
    rig = rig_of(FULL, WINDOW)
    rig.start(1, set_blocks(1, [(0, 1)]), set_blocks(1, [(1, 1)], group=1))
    with rig.refuses(StaleGenerationError, "plan.changes.generations[0]"):
        rig.start(2, set_blocks(2, [(0, 1)], allocated=False, group=1))


def test_publications_belong_to_a_group() -> None:
    rig = rig_of(FULL, WINDOW)
    rig.start(1, set_blocks(1, [(0, 1)]), set_blocks(1, [(1, 1)], group=1))
    message = publications((1, 1))
    assert rig.executor.publish(message) == 0  # the first group has no block 1
    message.group = 1
    assert rig.executor.publish(message) == 1
    reported = [p for part in rig.executor.report() for p in part.publications]
    assert reported == [message]
    named = {"indices": message.indices, "generations": message.generations}
    assert rig.executor.withdraw(rpb.WithdrawBlocks(**named)) == 0
    assert rig.executor.withdraw(rpb.WithdrawBlocks(**named, group=1)) == 1
    message.group = 2
    with rig.refuses(InvalidRequestError, "publications.group"):
        rig.executor.publish(message)


def test_a_shard_has_layers_of_each_group_and_whole_heads_of_them() -> None:
    whole = Shard.whole(BOTH)
    lacks_a_group = replace(whole, num_shards=2, num_layers=1)
    with refused(InvalidRequestError, "shard.first_layer"):
        Executor(BOTH, pool_id=POOL_ID, num_device_blocks=2, shard=lacks_a_group)
    groups = BOTH.groups[0], replace(BOTH.groups[1], num_kv_heads=1)
    half = replace(whole, num_shards=2, num_kv_heads=whole.num_kv_heads // 2)
    with refused(InvalidRequestError, "shard.num_kv_heads"):
        half.layers(replace(BOTH, groups=groups))
    with refused(InvalidRequestError, "num_device_blocks"):
        Executor(BOTH, pool_id=POOL_ID, num_device_blocks=(2, 2, 2))


def layout_of(window: int) -> Layout:
    groups = LayerGroup("full", (0,), 2, 16), LayerGroup("w", (1,), 2, 16, window)
    return replace(LAYOUT, block_size_tokens=16, groups=groups)


def test_a_group_with_a_window_gets_its_share_of_blocks_and_never_less_than_a_step_needs() -> None:
    layout, step = layout_of(1024), (1024 + STEP_TOKENS) // 16 + 1
    assert share_blocks(layout, 10_000, 32_768) == (10_000, -(-10_000 * step // 2048))
    assert share_blocks(layout, 300, 32_768) == (300, step)
    assert share_blocks(layout, 100, 32_768) == (100, 100)
    assert share_blocks(layout, 10_000, 100) == (10_000, 10_000)
    assert share_blocks(layout, 0, 32_768) == (0, 0)
    assert share_blocks(layout_of(0), 10, 32_768) == (10, 10)


def test_a_group_of_states_gets_a_checkpoint_for_each_sequence_and_never_less_than_a_few() -> None:
    states = LayerGroup("states", (1,), 1, 0, cache_kind=STATE, page_bytes=64)
    layout = replace(LAYOUT, block_size_tokens=16, groups=(LayerGroup("full", (0,), 2, 16), states))
    assert share_blocks(layout, 10_241, 8_192) == (10_241, 21)
    assert share_blocks(layout, 10, 8_192) == (10, 16)
    assert share_blocks(layout, 0, 8_192) == (0, 0)


@pytest.mark.parametrize("usable_bytes", [0, 10**5, 10**7, 10**9])
def test_as_many_blocks_as_fit(usable_bytes: int) -> None:
    layout = layout_of(1024)
    block_bytes = partial(Shard.whole(layout).block_bytes, layout)

    def takes(num_blocks: int) -> int:
        shares = share_blocks(layout, num_blocks, 32_768)
        return sum(num * block_bytes(i) for i, num in enumerate(shares))

    num_blocks = fit_blocks(layout, usable_bytes, 32_768, block_bytes)
    assert takes(num_blocks) <= usable_bytes < takes(num_blocks + 1)
