"""A client over all shards of a pool: whichever way it is divided, attention has the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import ControlClient, DataClient, LayerGroup, Tensor, ops
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError, PlaneUnavailableError, StaleEpochError
from tests.helpers.sharded_engine import OPTIONS, layer_input, outputs_of, prompt, run
from tests.helpers.sharded_pool import (
    BY_BOTH,
    BY_LAYERS,
    LAYOUT,
    NUM_HEADS,
    POOL,
    ShardedPool,
    by_heads,
)

WINDOWED = replace(
    LAYOUT,
    groups=(
        LayerGroup("full", (0, 2), 4, 8),
        LayerGroup("window", (1, 3), 2, 16, sliding_window_tokens=8),
    ),
)
SPARSE = replace(
    LAYOUT,
    groups=(
        LayerGroup("by query head", (0, 2), 4, 8, block_pattern=BlockPattern(16, 1, 3, 1)),
        LayerGroup("by KV head", (1, 3), 4, 8, block_pattern=BlockPattern(16, 1, 3, -1)),
    ),
)
LATENT_LIKE = replace(LAYOUT, groups=(LayerGroup("full", (0, 1, 2, 3), 2, 16, value_head_size=8),))


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, WINDOWED, SPARSE, LATENT_LIKE],
    ids=["one", "groups", "sparse", "latent"],
)
async def test_attention_has_the_same_bits_however_the_pool_is_divided(tmp_path, layout) -> None:
    divisions = {"2": by_heads(2), "4": by_heads(4), "layers": BY_LAYERS, "both": BY_BOTH}
    if layout is WINDOWED:  # a quarter of its heads is half a head of the group with a window
        divisions = {"2": by_heads(2), "both": BY_BOTH}
        divisions["layers"] = [
            {"num_shards": 2, "shard_index": 0, "layers": "0:2"},
            {"num_shards": 2, "shard_index": 1, "layers": "2:"},
        ]
    if layout is SPARSE:  # four layers of two groups
        divisions = {name: divisions[name] for name in ("2", "4", "both")}
    if layout is LATENT_LIKE:  # four shards have two KV heads: two copies of each
        divisions = {"2": by_heads(2), "4": by_heads(4), "8": by_heads(8)}
    expected = await outputs_of(tmp_path, by_heads(1), layout)
    for name, shards in divisions.items():
        outputs = await outputs_of(tmp_path, shards, layout)
        assert [x.shape for x in outputs] == [x.shape for x in expected], name
        for step, (have, want) in enumerate(zip(outputs, expected, strict=True)):
            assert bytes(have.data) == bytes(want.data), (name, step)


async def test_copies_of_a_kv_head_know_no_pattern_that_steps_by_query_heads(tmp_path) -> None:
    """They have some of its query heads, and the pool does not say which. KV heads they know."""
    by_kv_head = replace(LATENT_LIKE.groups[0], block_pattern=BlockPattern(16, 1, 3, -1))
    layout = replace(LATENT_LIKE, groups=(by_kv_head,))
    expected = await outputs_of(tmp_path, by_heads(1), layout)
    outputs = await outputs_of(tmp_path, by_heads(4), layout)
    assert [bytes(x.data) for x in outputs] == [bytes(x.data) for x in expected]
    by_head = replace(by_kv_head, block_pattern=BlockPattern(16, 1, 3, 1))
    with pytest.raises(InvalidRequestError, match="copy of a KV head") as caught:
        await outputs_of(tmp_path, by_heads(4), replace(layout, groups=(by_head,)))
    assert caught.value.field == "layer.options.block_pattern.head_sliding_step"


async def test_a_mask_of_blocks_has_the_same_bits_however_the_pool_is_divided(tmp_path) -> None:
    seen = Tensor("uint8", (1, NUM_HEADS, 2), bytes(int(i % 3 == 0) for i in range(2 * NUM_HEADS)))
    masked = AttentionOptions(block_pattern=BlockPattern(16, 1), seen_blocks=seen)
    outputs = []
    for num_shards, options in ((1, masked), (2, masked), (1, AttentionOptions())):
        async with (
            ShardedPool(tmp_path, by_heads(num_shards)) as pool,
            ControlClient(pool.address) as control,
            control.open_session(POOL, LAYOUT) as session,
            session.open_execution() as execution,
        ):
            await execution.start((await session.step([ops.admit(1, prompt(21))])).plan)
            rows = layer_input(LAYOUT, 0, execution.num_tokens, 0)
            outputs.append(bytes((await execution.layer(0, *rows, options=options)).data))
    assert outputs[0] == outputs[1] != outputs[2]


async def test_a_layer_that_a_shard_did_not_answer_is_sent_again(tmp_path) -> None:
    """The other shard had answered, and answers again; both then have one plan and one receipt."""
    expected = await outputs_of(tmp_path, by_heads(1), LAYOUT)
    pool = ShardedPool(tmp_path, by_heads(2))
    async with (
        pool,
        ControlClient(pool.address) as control,
        await control.open_session(POOL, LAYOUT) as session,
        session.open_execution() as execution,
    ):
        plan = (await session.step([ops.admit(1, prompt(21))])).plan
        await execution.start(plan)
        num_tokens = execution.num_tokens
        outputs = []
        for layer in execution.layers:
            tensors = layer_input(LAYOUT, layer, num_tokens, 0)
            half = [tensor.of_heads([range(tensor.shape[1] // 2)]) for tensor in tensors]
            async with (
                DataClient(session.shards[0].address) as data,
                await data.open(session.grant) as lone,
            ):
                await lone.start(plan)
                await lone.layer(layer, *half, options=OPTIONS.of_heads([range(NUM_HEADS // 2)]))
            outputs.append(await execution.layer(layer, *tensors, options=OPTIONS))
        assert [bytes(x.data) for x in outputs] == [bytes(x.data) for x in expected[:4]]
        assert execution.has_run


async def test_a_killed_shard_is_a_typed_error_and_its_successor_a_new_epoch(tmp_path) -> None:
    pool = ShardedPool(tmp_path, by_heads(2))
    async with pool, ControlClient(pool.address) as control:
        session = await control.open_session(POOL, LAYOUT)
        async with session.open_execution() as execution:
            await run(session, execution, 0, ops.admit(1, prompt(16)))
            result = await session.step([ops.append(1, [1], 1, first_positions=16)])
            await pool.stop(1)
            with pytest.raises(PlaneUnavailableError):
                await execution.start(result.plan, timeout_s=0.5)
            assert [len(execution.receipts), execution.has_run] == [0, False]
        await pool.start(1)
        with pytest.raises(StaleEpochError):
            await session.step([ops.free([])])
        epochs = [info.epoch for info in session.shards]
        session = await session.reopen()
        later = [info.epoch for info in session.shards]
        assert epochs[0] == later[0]
        assert epochs[1] < later[1]
        async with session.open_execution() as execution:
            # One shard's report had the prompt, the other's did not: it is computed again.
            outputs = await run(session, execution, 0, ops.admit(1, prompt(16)))
            assert outputs[0].shape[0] == 16
            outputs = await run(session, execution, 0, ops.admit(2, prompt(16)))
            assert outputs[0].shape[0] == 1
        await session.close()


async def test_what_does_not_fit_the_shards_is_refused_by_name(tmp_path) -> None:
    async with (
        ShardedPool(tmp_path, by_heads(2)) as pool,
        ControlClient(pool.address) as control,
        await control.open_session(POOL, LAYOUT) as session,
        session.open_execution() as execution,
    ):
        plan = (await session.step([ops.admit(1, [1, 2])])).plan
        await execution.start(plan)
        query, key, value = layer_input(LAYOUT, 0, 2, 0)
        with pytest.raises(InvalidRequestError, match="layer"):
            await execution.layer(4, query, key, value)
        with pytest.raises(InvalidRequestError, match="query"):
            await execution.layer(0, query.of_heads([range(5)]), key, value)
