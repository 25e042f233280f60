"""An engine on all shards of a pool, whose tensors depend on the step and the layer alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy

from kvplane import ControlClient, Execution, Layout, Session, Tensor, ops
from kvplane.attention_options import AttentionOptions
from kvplane.results import StepResult
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.sharded_pool import NUM_HEADS, POOL, Ranges, ShardedPool

OPTIONS = AttentionOptions(
    alibi_slopes=tuple(i / 16 for i in range(NUM_HEADS)), sinks=tuple(range(NUM_HEADS))
)


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    values = numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)
    return Tensor("float32", tuple(shape), values.tobytes())


def layer_input(layout: Layout, layer: int, num_tokens: int, seed: int) -> list[Tensor]:
    group = next(group for group in layout.groups if layer in group.layers)
    kv_heads, seed = group.num_kv_heads, 100 * seed + 10 * layer
    return [
        numbers((num_tokens, NUM_HEADS, group.head_size), seed),
        numbers((num_tokens, kv_heads, group.head_size), seed + 1),
        numbers((num_tokens, kv_heads, group.value_size), seed + 2),
    ]


async def run(
    session: Session, execution: Execution, step: int, operation: pb.Operation
) -> list[Tensor]:
    """Run one step; return its outputs, layer by layer."""
    return await finish(session, execution, await session.step([operation]), step)


async def finish(
    session: Session, execution: Execution, result: StepResult, step: int
) -> list[Tensor]:
    """Return the outputs of a step that was answered."""
    assert result.plan is not None, result
    await execution.start(result.plan)
    assert not execution.has_run
    outputs = [
        await execution.layer(
            layer,
            *layer_input(session.layout, layer, execution.num_tokens, step),
            options=OPTIONS,
        )
        for layer in execution.layers
    ]
    assert len(execution.receipts) == len(session.shards)
    return outputs


def prompt(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(100), k=num_tokens)


async def outputs_of(folder: Path, shards: list[Ranges], layout: Layout) -> list[Tensor]:
    """Return outputs of prefill, two decode steps, and a sequence that hits the first one."""
    async with (
        ShardedPool(folder, shards, layout) as pool,
        ControlClient(pool.address) as control,
        control.open_session(POOL, layout) as session,
        session.open_execution() as execution,
    ):
        assert execution.layers == [0, 1, 2, 3]
        outputs = await run(session, execution, 0, ops.admit(1, prompt(21)))
        for step in (1, 2):
            append = ops.append(1, [step], 1, first_positions=20 + step)
            outputs += await run(session, execution, step, append)
        admit = ops.admit(2, [*prompt(21)[:16], 7, 8, 9])
        outputs += await run(session, execution, 3, admit)
        assert outputs[-1].shape[0] == 3  # the two blocks before were found
        return outputs
