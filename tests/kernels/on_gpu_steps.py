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
    PROMPTS,
    STEPS,
    Inputs,
    rig_with_prompts,
    run_by_layers,
    start_step,
)

OPTIONS = (
    AttentionOptions(),
    AttentionOptions(sliding_window_tokens=70, sinks=(0.5, -1.0, 2.0, 0.0), logit_soft_cap=20.0),
)


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "window-sinks-cap"))
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
    lengths = dict(PROMPTS)
    for number, of_step in enumerate(STEPS, 2):
        for each in (rig, twin):
            start_step(each, number, of_step, lengths)
        inputs.fill(len(of_step), number)
        step.run(graph.replay, plan_number=number)
        outputs = inputs.outputs(len(of_step))
        assert rig.executor.receipt(1) is not None
        expected = run_by_layers(twin, inputs, len(of_step), options)
        for output, right in zip(outputs, expected, strict=True):
            assert torch.equal(output, right)
        pools = [each.executor.pools.device_tier.view(torch.uint8) for each in (rig, twin)]
        assert torch.equal(*pools)
        for sequence in of_step:
            lengths[sequence] += 1
    inputs.fill(BOUNDS.num_tokens, 9)
    before = rig.executor.pools.device_tier.clone()
    graph.replay()  # Without rows it writes nothing.
    rig.executor.finish()
    assert torch.equal(rig.executor.pools.device_tier, before)
    rig.executor.check_integrity()
