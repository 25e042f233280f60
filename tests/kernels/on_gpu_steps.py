"""An executor's step captured in a CUDA graph: replayed for plan after plan, it gives the bits of
steps that go layer by layer.

benchmarks/gpu/first.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

import pytest
import torch

from kvplane.attention_options import AttentionOptions
from tests.helpers.data.fixed_steps import (
    BOUNDS,
    OPTIONS,
    Inputs,
    assert_replays,
    rig_with_prompts,
)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_captured_step_is_replayed_for_plan_after_plan(options: AttentionOptions) -> None:
    rig, twin = (rig_with_prompts(device="cuda") for _ in range(2))
    step, inputs = rig.executor.fixed_step(1, BOUNDS), Inputs(BOUNDS.num_tokens, "cuda")

    def forward() -> None:
        for layer, (query, key, value, out) in enumerate(inputs.layers):
            step.layer(layer, query, key, value, options=options, out=out)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    assert_replays(rig, twin, step, inputs, graph.replay, options)
    inputs.fill(BOUNDS.num_tokens, 9)
    before = rig.executor.pools.device_tier.clone()
    graph.replay()  # Without rows it writes nothing.
    rig.executor.finish()
    assert torch.equal(rig.executor.pools.device_tier, before)
    rig.executor.check_integrity()
