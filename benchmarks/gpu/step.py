"""Measures the host's time for an executor's decode step: layer by layer, and as a CUDA graph.

    python -m benchmarks.gpu.step [--batch 16] [--context 4096] [--layers 32] [--steps 10]

On a GPU a step is captured by torch.cuda.graph and replayed for each plan; its outputs and the pool
must have the bits of steps that go layer by layer, or the exit code is 1. Without a GPU the CUDA
sources compiled for the emulator (tests/kernels has to be in PYTHONPATH) take the calls, and
kernels are not run: this times the host's part, without the driver's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from benchmarks.gpu.session import SESSION, Session
from data_plane import FixedStep, StepBounds
from data_plane.kernels.backends.cuda import CudaKernels
from kvplane.layout import LayerGroup, Layout

HEADS: Final = (32, 8)
HEAD_SIZE: Final = 128
BLOCK_SIZE: Final = 16
LAUNCHES: Final = ("reshape_and_cache", "paged_attention")


class WithoutKernels:
    """A native module that launches nothing."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._plan: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in LAUNCHES:
            return lambda **arguments: None
        return self.plan_attention if name == "plan_attention" else getattr(self._module, name)

    def plan_attention(self, **arguments: Any) -> Any:
        """Always the first one."""
        if self._plan is None:
            self._plan = self._module.plan_attention(**arguments)
        return self._plan


class Steps:
    """Decode steps of one session, by layers or with a fixed step."""

    def __init__(
        self, arguments: argparse.Namespace, device: torch.device, *, is_launched: bool = True
    ) -> None:
        """``is_launched``: whether kernels run, on the emulator."""
        self.batch, self.context = arguments.batch, arguments.context
        group = LayerGroup("full", tuple(range(arguments.layers)), HEADS[1], HEAD_SIZE)
        layout = Layout("benchmark", BLOCK_SIZE, "bfloat16", "bfloat16", (group,))
        self._layers, kernels = group.layers, None
        if device.type == "cpu":
            native: Any = import_module("emulated_build").emulated_module()
            kernels = CudaKernels(native if is_launched else WithoutKernels(native), device)
        tokens = self.context + 2 * arguments.steps + 8
        self._session = Session(layout, self.batch, tokens, device, kernels)
        self.executor = self._session.executor
        self._bounds = StepBounds(self.batch, tokens)
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.batch, heads, HEAD_SIZE) for heads in (HEADS[0], HEADS[1], HEADS[1])]
        self.inputs = [
            [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]
            for _ in self._layers
        ]
        self.outputs = [torch.empty_like(query) for query, _, _ in self.inputs]

    def fixed(self) -> FixedStep:
        return self.executor.fixed_step(SESSION.session_id, self._bounds)

    def start(self, index: int) -> None:
        """Start the plan of a step."""
        self._session.start([self.context + index] * self.batch)

    def finish(self) -> None:
        assert self.executor.receipt(SESSION.session_id) is not None

    def by_layers(self) -> None:
        for layer, tensors in zip(self._layers, self.inputs, strict=True):
            output = self.executor.layer(
                SESSION.session_id, layer, *tensors, plan_number=self._session.number
            )
            assert output is not None
            self.outputs[layer] = output

    def run(self, step: FixedStep, call: Callable[[], object]) -> None:
        """Run the plan that was started by ``call``, in the step."""
        step.run(call, plan_number=self._session.number)

    def by(self, step: FixedStep) -> None:
        given = zip(self._layers, self.inputs, self.outputs, strict=True)
        for layer, tensors, out in given:
            step.layer(layer, *tensors, out=out)

    def seconds(self, first: int, num_steps: int, call: Callable[[], object]) -> float:
        """Return the median time that the host spends in ``call``, over some steps."""
        times = []
        for index in range(first, first + num_steps):
            self.start(index)
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
            self.finish()
        return statistics.median(times)


def captured(steps: Steps, step: FixedStep) -> Callable[[], None]:
    """Return a graph of all layers; without a GPU, the layers."""
    steps.by(step)
    if not torch.cuda.is_available():
        return lambda: steps.by(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.by(step)
    replay: Callable[[], None] = graph.replay
    return replay


def compare(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Return whether replayed steps have the bits of steps by layers."""
    few = argparse.Namespace(**vars(arguments) | {"layers": min(2, arguments.layers)})
    twins = [Steps(few, device) for _ in range(2)]
    for steps in twins:
        steps.executor.pools.device_tier.zero_()
    step = twins[1].fixed()
    replay = captured(twins[1], step)
    for index in range(4):
        calls = twins[0].by_layers, lambda: twins[1].run(step, replay)
        for steps, call in zip(twins, calls, strict=True):
            steps.start(index)
            call()
            steps.finish()
        pairs = list(zip(twins[0].outputs, twins[1].outputs, strict=True))
        pools = [steps.executor.pools.device_tier for steps in twins]
        if not all(torch.equal(a, b) for a, b in pairs) or not torch.equal(*pools):
            return False
    return True


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.step")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(words)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    where = torch.cuda.get_device_name() if is_gpu else "no GPU, kernels left out"
    shape = f"{arguments.batch} decodes after {arguments.context}, {arguments.layers} layers"
    steps = Steps(arguments, device, is_launched=False)
    by_layers_s = steps.seconds(0, arguments.steps, steps.by_layers)
    step = steps.fixed()
    replay = captured(steps, step)
    layers_s = steps.seconds(
        arguments.steps, arguments.steps, lambda: steps.run(step, lambda: steps.by(step))
    )
    print(f"host time of a layer call ({where}; {shape}):")
    of_layer = 1e6 / arguments.layers
    print(f"  Executor.layer   {by_layers_s * of_layer:8.1f} µs, {by_layers_s * 1e3:.2f} ms a step")
    print(f"  FixedStep.layer  {layers_s * of_layer:8.1f} µs, {layers_s * 1e3:.2f} ms a step")
    if not is_gpu:
        fill_s = steps.seconds(2 * arguments.steps, 4, lambda: steps.run(step, int))
        print(f"  FixedStep.run    {fill_s * 1e6:8.1f} µs a step, beside the replay of a graph")
        return 0
    replay_s = steps.seconds(2 * arguments.steps, 4, lambda: steps.run(step, replay))
    print(f"  FixedStep.run    {replay_s * 1e6:8.1f} µs a step, with the replay of a graph")
    is_right = compare(arguments, device)
    print("a captured step: " + ("the same bits as by layers" if is_right else "WRONG"))
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
