"""Plans in passes, as a client asks for them: over gRPC, and through shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from kvplane import Execution
from kvplane.attention_options import AttentionOptions
from kvplane.errors import PlanOutOfOrderError
from kvplane.execution.execution import shards_of
from kvplane.runtime.region_layers import RegionLayers
from kvplane.tensor import Tensor
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.plan_author import PlanAuthor, dense_attention, set_blocks, span, tokens
from tests.helpers.refusals import refused
from tests.helpers.served import Served, served

NUM_TOKENS = 5  # of one sequence, one in each pass
LAYERS = range(2)
QUERY, KEY, VALUE = tokens(NUM_TOKENS, 4, seed=1), tokens(NUM_TOKENS, seed=2), tokens(NUM_TOKENS)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, local_region_bytes=1 << 20) as rig:
        yield rig


def plan_of(author: PlanAuthor) -> tpb.SignedPayload:
    return author.plan(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, NUM_TOKENS)])


async def layer(execution: Execution, index: int, of_pass: int) -> torch.Tensor:
    rows = [Tensor.from_array(t[of_pass : of_pass + 1]) for t in (QUERY, KEY, VALUE)]
    output: torch.Tensor = (await execution.layer(index, *rows)).torch()
    return output


def check(outputs: list[torch.Tensor]) -> None:
    want = dense_attention(QUERY, KEY, VALUE)
    torch.testing.assert_close(torch.cat(outputs), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("begins", [False, True], ids=["start", "begin"])
@pytest.mark.parametrize("shared_memory", [False, True], ids=["gRPC", "shared memory"])
async def test_a_plan_runs_pass_by_pass(rig: Served, shared_memory: bool, begins: bool) -> None:
    plan, outputs = plan_of(rig.author), []
    async with (
        rig.client(shared_memory=shared_memory) as client,
        await client.open(rig.author.grant()) as execution,
    ):
        assert (shards_of(execution)[0].local is not None) is shared_memory
        for of_pass in range(NUM_TOKENS):
            if begins:
                await execution.begin(plan, 1, pass_index=of_pass)
            else:
                await execution.start(plan, pass_index=of_pass)
                assert execution.num_tokens == 1
            for index in LAYERS:
                assert not execution.receipts
                output = await layer(execution, index, of_pass)
            outputs.append(output)
        assert rig.author.read_receipt(*execution.receipts).plan_number == 1
    check(outputs)


async def test_native_code_refuses_a_late_layer_of_an_earlier_pass(rig: Served) -> None:
    """On a stream that its client has left: it began the pass before, and came with one token."""
    plan, outputs, options = plan_of(rig.author), [], AttentionOptions()
    async with (
        rig.client() as left_client,
        await left_client.open(rig.author.grant()) as left,
        rig.client(shared_memory=False) as client,
        await client.open(rig.author.grant()) as execution,
    ):
        layers = RegionLayers(shards_of(left)[0])
        for of_pass in range(NUM_TOKENS):
            if of_pass in (1, 2, 3):
                await left.start(plan, pass_index=of_pass)
                if of_pass < 3:  # so that its layers are bound
                    own = slice(of_pass, of_pass + 1)
                    for index in LAYERS:
                        output = layers.layer(index, QUERY[own], KEY[own], VALUE[own], options)
                    outputs.append(output)
                    continue
            await execution.start(plan, pass_index=of_pass)
            if of_pass > 3:
                with refused(PlanOutOfOrderError, "layer.pass_index"):
                    layers.layer(0, QUERY[3:4], KEY[3:4], VALUE[3:4], options)
            for index in LAYERS:
                output = await layer(execution, index, of_pass)
            outputs.append(output)
        assert rig.author.read_receipt(*execution.receipts).plan_number == 1
    check(outputs)
