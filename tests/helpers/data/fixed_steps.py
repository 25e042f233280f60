"""A session whose steps run in fixed rows, its twin that runs them layer by layer, and a recorder
of a step's native calls, which can be replayed as a CUDA graph would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from data_plane import FixedStep, StepBounds
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.layout import Layout
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.kernel_sets import emulated_kernels
from tests.helpers.data.plan_author import LAYOUT, set_blocks, span, tokens

BFLOAT: Layout = replace(LAYOUT, dtype="bfloat16", kv_dtype="bfloat16")
PROMPTS = {1: 100, 2: 9, 3: 70}
"""Sequences, and the tokens of their prompts: splits are of 64 tokens."""
BOUNDS = StepBounds(num_tokens=4, context_tokens=120)
STEPS: Sequence[Sequence[int]] = ((1, 2, 3), (3,), (2, 1, 3), (2, 3))
"""The sequences that get a token in each step, fewer than there is room for."""

OPTIONS = {
    "plain": AttentionOptions(),
    "window-sinks-cap": AttentionOptions(
        sliding_window_tokens=70, sinks=(0.5, -1.0, 2.0, 0.0), logit_soft_cap=20.0
    ),
    "blocks in a pattern": AttentionOptions(block_pattern=BlockPattern(16, 1, 3, 1)),
    "alibi": AttentionOptions(alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
}

Call = tuple[Callable[..., Any], dict[str, Any]]


class Recorder:
    """A native module that notes the calls that a graph would capture."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in ("reshape_and_cache", "plan_attention", "paged_attention"):
            return function

        def call(**arguments: Any) -> Any:
            self.calls.append((function, arguments))
            return function(**arguments)

        return call

    def taken(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls


def play(calls: Sequence[Call]) -> None:
    for function, arguments in calls:
        function(**arguments)


class Inputs:
    """A step's tensors, at addresses that stay: query, key, value and output of each layer."""

    def __init__(self, num_tokens: int, device: str = "cpu") -> None:
        self.num_tokens = num_tokens
        shapes = [(num_tokens, num_heads, 16) for num_heads in (4, 2, 2, 4)]
        self.layers = [
            tuple(torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
            for _ in LAYERS
        ]

    def fill(self, num_tokens: int, seed: int) -> None:
        """Fill in the tokens, and NaN behind them."""
        for i, of_layer in enumerate(self.layers):
            for j, tensor in enumerate(of_layer):
                tensor.fill_(torch.nan)
                if j < 3:
                    given = tokens(num_tokens, tensor.shape[1], seed=100 * seed + 10 * i + j)
                    tensor[:num_tokens] = given

    def outputs(self, num_tokens: int) -> list[torch.Tensor]:
        return [out[:num_tokens].clone() for *_, out in self.layers]


class Stepped:
    """The session, whose prompts have run."""

    def __init__(
        self, bounds: StepBounds = BOUNDS, options: AttentionOptions = AttentionOptions()
    ) -> None:
        kernels: Any = emulated_kernels()
        self.recorder = kernels._module = Recorder(kernels._module)
        self.rig = rig_with_prompts(kernels=kernels)
        self.step: FixedStep = self.rig.executor.fixed_step(1, bounds)
        self.inputs = Inputs(bounds.num_tokens)
        self.options = options
        self.recorder.taken()

    def forward(self, inputs: Inputs | None = None) -> None:
        """Run all layers of a step."""
        inputs = inputs or self.inputs
        for layer, (query, key, value, out) in zip(LAYERS, inputs.layers, strict=True):
            self.step.layer(layer, query, key, value, options=self.options, out=out)

    def captured(self) -> list[Call]:
        """Return the calls of a step that has no rows yet, after a first pass."""
        self.forward()
        self.recorder.taken()
        self.forward()
        return self.recorder.taken()


def rig_with_prompts(**settings: Any) -> Rig:
    rig = Rig(layout=BFLOAT, num_device_blocks=64, **settings)
    first, changes = 0, []
    for sequence, length in PROMPTS.items():
        num_blocks = -(-(length + len(STEPS) + 1) // BFLOAT.block_size_tokens)
        changes.append(set_blocks(sequence, [(first + i, 1) for i in range(num_blocks)]))
        first += num_blocks
    rig.start(1, *changes, *[span(s, 0, n) for s, n in PROMPTS.items()])
    inputs = Inputs(sum(PROMPTS.values()), settings.get("device", "cpu"))
    inputs.fill(inputs.num_tokens, 1)
    for layer, (_, key, value, _) in zip(LAYERS, inputs.layers, strict=True):
        rig.run_layer(layer, None, key, value)
    assert rig.executor.receipt(1) is not None
    return rig


def run_by_layers(
    rig: Rig, inputs: Inputs, num_tokens: int, options: AttentionOptions = AttentionOptions()
) -> list[torch.Tensor]:
    """Run the latest plan without a fixed step."""
    outputs = []
    for layer, of_layer in zip(LAYERS, inputs.layers, strict=True):
        query, key, value = (tensor[:num_tokens].clone() for tensor in of_layer[:3])
        output = rig.run_layer(layer, query, key, value, options=options)
        assert output is not None
        outputs.append(output)
    assert rig.executor.receipt(1) is not None
    return outputs


def start_step(rig: Rig, number: int, step: Sequence[int], lengths: dict[int, int]) -> None:
    """Start plan ``number``: a token for each of these sequences."""
    rig.start(number, *[span(s, lengths[s], 1) for s in step])


def assert_replays(
    rig: Rig,
    twin: Rig,
    step: FixedStep,
    inputs: Inputs,
    replay: Callable[[], object],
    options: AttentionOptions,
) -> None:
    """Replay plan after plan: outputs, memory and counts are those of the twin, layer by layer."""
    lengths = dict(PROMPTS)
    for number, of_step in enumerate(STEPS, 2):
        for each in (rig, twin):
            start_step(each, number, of_step, lengths)
        inputs.fill(len(of_step), number)
        step.run(replay, plan_number=number)
        outputs = inputs.outputs(len(of_step))
        assert rig.author.read_receipt(rig.executor.receipt(1)).plan_number == number
        expected = run_by_layers(twin, inputs, len(of_step), options)
        for output, right in zip(outputs, expected, strict=True):
            assert torch.equal(output.view(torch.int16), right.view(torch.int16))
        pools = [each.executor.pools.device_tier.view(torch.uint8) for each in (rig, twin)]
        assert torch.equal(*pools)
        for sequence in of_step:
            lengths[sequence] += 1
    first, second = (each.executor.counters for each in (rig, twin))
    assert first.num_written_tokens == second.num_written_tokens
    assert first.num_attention_tokens == second.num_attention_tokens
