"""Measures the cost of running a plan on several shards: the same plans on pools of 1, 2, 4 and 8.

    python -m benchmarks.transport.shards [--shards 1 2 4 8] [--steps N] [--tokens N]

Control plane and data planes are processes of their own on loopback, each kernel with one thread;
the pools live at the same time and take turns. A step appends one token to each of N sequences;
timed are the control plane's step, presenting the plan to all shards until each has answered, and
a layer: q, k and v of all heads divided, sent, attended to, and the outputs joined.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.common.processes import start, start_control_plane
from benchmarks.common.report import machine, said
from benchmarks.common.timing import quantile
from kvplane import ControlClient, Execution, LayerGroup, Layout, Session, Tensor, ops

NUM_LAYERS: Final = 4
NUM_KV_HEADS: Final = 8
NUM_HEADS: Final = 32
HEAD_SIZE: Final = 64
LAYOUT: Final = Layout(
    "fan-out",
    16,
    "float32",
    "float32",
    (LayerGroup("full", tuple(range(NUM_LAYERS)), NUM_KV_HEADS, HEAD_SIZE),),
)
PROMPT_TOKENS: Final = 64


@contextmanager
def planes(folder: Path, counts: list[int]) -> Iterator[str]:
    """Run a control plane with a pool for each count of shards; yield its address."""
    layout = folder / "layout.json"
    layout.write_text(json.dumps(asdict(LAYOUT)))
    with ExitStack() as stack:
        _, address = start_control_plane(stack)
        for count in counts:
            for index in range(count):
                start(
                    stack,
                    *("data_plane", "--bind", "127.0.0.1:0", "--control-plane", address),
                    *("--layout", str(layout), "--pool-id", f"pool-{count}"),
                    *("--num-shards", str(count), "--shard-index", str(index)),
                    *("--num-device-blocks", "512", "--num-threads", "1"),
                )
        yield address


class Engine:
    """One session of one pool, which decodes ``num_tokens`` sequences."""

    def __init__(self, session: Session, execution: Execution, num_tokens: int) -> None:
        self._session = session
        self._execution = execution
        self._ids = range(1, num_tokens + 1)
        self._length = PROMPT_TOKENS

    async def prefill(self) -> None:
        """Compute the prompts."""
        tokens = [i % 1000 for i in range(PROMPT_TOKENS)]
        operations = [ops.admit(i, [i, *tokens[1:]]) for i in self._ids]
        await self._run(operations, defaultdict(list))

    async def decode(self, times: dict[str, list[float]]) -> None:
        """Run one step; add its microseconds."""
        tokens = [7] * len(self._ids)
        append = ops.append(self._ids, tokens, 1, first_positions=self._length, num_tokens=1)
        self._length += 1
        await self._run([append], times)

    async def _run(self, operations: list, times: dict[str, list[float]]) -> None:
        began_s = time.perf_counter()
        plan = (await self._session.step(operations)).plan
        planned_s = time.perf_counter()
        await self._execution.start(plan)
        num_tokens = self._execution.num_tokens
        started_s = time.perf_counter()
        query = Tensor.zeros("float32", (num_tokens, NUM_HEADS, HEAD_SIZE))
        key = Tensor.zeros("float32", (num_tokens, NUM_KV_HEADS, HEAD_SIZE))
        for layer in self._execution.layers:
            layer_s = time.perf_counter()
            await self._execution.layer(layer, query, key, key)
            times["layer"].append((time.perf_counter() - layer_s) * 1e6)
        assert self._execution.has_run
        times["step"].append((planned_s - began_s) * 1e6)
        times["start"].append((started_s - planned_s) * 1e6)


async def measure(address: str, counts: list[int], num_steps: int, num_tokens: int) -> None:
    """Print a line for each count of shards."""
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlClient(address))
        engines = {}
        for count in counts:
            await control.wait_ready(f"pool-{count}", timeout_s=180)
            opening = control.open_session(f"pool-{count}", LAYOUT)
            session = await stack.enter_async_context(opening)
            engines[count] = Engine(session, await session.open_execution(), num_tokens)
            await engines[count].prefill()
        times: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in counts}
        for _ in range(num_steps):
            for count, engine in engines.items():
                await engine.decode(times[count])
    print(
        f"{'shards':>6} {'step p50':>10} {'start p50':>10} {'p99':>8} {'layer p50':>10} {'p99':>8}"
    )
    for count in counts:
        of = {name: sorted(values) for name, values in times[count].items()}
        print(
            f"{count:>6} {quantile(of['step'], 0.5):>7.0f} µs {quantile(of['start'], 0.5):>7.0f} µs"
            f" {quantile(of['start'], 0.99):>8.0f} {quantile(of['layer'], 0.5):>7.0f} µs"
            f" {quantile(of['layer'], 0.99):>8.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8, help="sequences that decode")
    options = parser.parse_args()
    print(
        f"{said(machine())}; {options.tokens} sequences, {NUM_HEADS}/{NUM_KV_HEADS} heads of "
        f"{HEAD_SIZE}, float32, {options.steps} steps"
    )
    with tempfile.TemporaryDirectory() as folder, planes(Path(folder), options.shards) as address:
        asyncio.run(measure(address, options.shards, options.steps, options.tokens))


if __name__ == "__main__":
    main()
