"""Measures a step over gRPC: both planes as processes, one session, packed tokens, real plans.

    python -m benchmarks.step_latency [--quick] [--json OUT]

``step`` is one Step on the stream: the control plane plans, encodes and signs. ``execute`` runs the
plan at the data plane, with one layer of one head, so that the protocol is measured and not
attention. No two steps have the same content, so nothing is memoised.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.planes import Planes
from kvplane import ControlClient, Execution, LayerGroup, Layout, Session, Tensor, ops
from kvplane.wire.v1 import session_pb2 as pb

BLOCK_SIZE_TOKENS = 16
HEAD_SIZE = 8
LAYOUT = Layout(
    model_id="benchmark",
    block_size_tokens=BLOCK_SIZE_TOKENS,
    dtype="float32",
    kv_dtype="float32",
    groups=(LayerGroup("full", (0,), num_kv_heads=1, head_size=HEAD_SIZE),),
)
NUM_DEVICE_BLOCKS = 20_000
DECODE_BATCHES = (1, 64, 256)
PROMPT_TOKENS = (4_096, 32_768)


@dataclass(frozen=True)
class Latencies:
    """The latencies of one kind of step, in seconds."""

    name: str
    step_s: Sequence[float]
    execute_s: Sequence[float]


class Bench:
    """One session and one execution, and steps whose two halves are timed."""

    def __init__(self, session: Session, execution: Execution) -> None:
        self._session = session
        self._execution = execution
        self._ids = itertools.count(1)

    def new_ids(self, num: int) -> list[int]:
        """Return sequence ids that were not used before."""
        return list(itertools.islice(self._ids, num))

    async def run(
        self, operations: Sequence[pb.Operation], num_tokens: int | None = None
    ) -> tuple[float, float]:
        """Return the seconds of the step and of its plan's execution. All operations must succeed.
        ``num_tokens``: tokens that the plan computes, where known.
        """
        began = time.perf_counter()
        result = await self._session.step(operations)
        stepped = time.perf_counter()
        result.raise_for_status()
        if result.plan is not None:
            if num_tokens:
                await self._execution.begin(result.plan, num_tokens)
            else:
                await self._execution.start(result.plan)
                num_tokens = self._execution.num_tokens
            if num_tokens:
                tensor = Tensor(
                    "float32", (num_tokens, 1, HEAD_SIZE), bytes(num_tokens * HEAD_SIZE * 4)
                )
                await self._execution.layer(0, query=None, key=tensor, value=tensor)
        return stepped - began, time.perf_counter() - stepped

    async def decode(self, num_sequences: int, num_steps: int) -> Latencies:
        """Time steps that append one token to each of ``num_sequences``."""
        ids = self.new_ids(num_sequences)
        await self.run([ops.admit(i, prompt(i, 2 * BLOCK_SIZE_TOKENS)) for i in ids])
        times = []
        for step in range(num_steps):
            tokens, position = [step + i for i in ids], 2 * BLOCK_SIZE_TOKENS + step
            append = ops.append(ids, tokens, 1, first_positions=position, num_tokens=1)
            times.append(await self.run([append], num_sequences))
        await self.run([ops.free(ids)])
        return Latencies(f"decode of {num_sequences}", *zip(*times, strict=True))

    async def admit(self, num_tokens: int, num_steps: int, *, cached: bool) -> Latencies:
        """Time steps that admit a prompt of ``num_tokens``; if ``cached``, one published before."""
        times = []
        tokens = prompt(next(self._ids), num_tokens)
        if cached:
            await self._publish(tokens)
        for sequence_id in self.new_ids(num_steps):
            if not cached:
                tokens = prompt(sequence_id, num_tokens)
            times.append(await self.run([ops.admit(sequence_id, tokens)]))
            await self.run([ops.free([sequence_id])])
        state = "all cached" if cached else "not cached"
        return Latencies(f"prompt of {num_tokens:,}, {state}", *zip(*times, strict=True))

    async def _publish(self, tokens: bytes) -> None:
        (sequence_id,) = self.new_ids(1)
        await self.run([ops.admit(sequence_id, tokens)])
        await self.run([ops.free([sequence_id])])


def prompt(seed: int, num_tokens: int) -> bytes:
    """Return packed token ids. Prompts of different seeds differ in the first block."""
    return ops.pack_tokens([seed, *range(1, num_tokens)])


async def measure(control: str, num_steps: int) -> list[Latencies]:
    """Time all kinds of steps, in one session."""
    async with ControlClient(control, shared_memory=False) as client:
        await client.wait_ready("default", 60.0)
        async with (
            client.open_session("default", LAYOUT) as session,
            session.open_execution() as execution,
        ):
            bench = Bench(session, execution)
            latencies = [await bench.decode(n, num_steps) for n in DECODE_BATCHES]
            for num_tokens in PROMPT_TOKENS:
                for cached in (False, True):
                    latencies.append(await bench.admit(num_tokens, num_steps // 10, cached=cached))
            return latencies


def quantile_us(seconds: Sequence[float], quantile: float) -> float:
    """Return a quantile by the nearest rank, in microseconds."""
    ordered = sorted(seconds)
    return 1e6 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def as_json(latencies: Sequence[Latencies]) -> dict[str, object]:
    """Return the figures of the table, for programs."""
    return {
        "machine": {
            "cpu_count": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "rows": [
            {
                "name": f"{part}/{each.name}",
                "unit": "us",
                "num_samples": len(seconds),
                "p50": round(quantile_us(seconds, 0.5), 1),
                "p99": round(quantile_us(seconds, 0.99), 1),
            }
            for each in latencies
            for part, seconds in (("step", each.step_s), ("execute", each.execute_s))
        ],
    }


def print_table(latencies: Sequence[Latencies]) -> None:
    """Print one line for each kind of step, in microseconds."""
    print(f"{'':32}{'step':>20}{'execute':>20}")
    print(f"{'microseconds':32}{'p50':>10}{'p99':>10}{'p50':>10}{'p99':>10}")
    for each in latencies:
        cells = [quantile_us(s, q) for s in (each.step_s, each.execute_s) for q in (0.5, 0.99)]
        print(f"{each.name:32}" + "".join(f"{cell:>10,.0f}" for cell in cells))


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure a step's latency over gRPC.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/step_latency.json"))
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        layout = Path(folder) / "layout.json"
        layout.write_text(json.dumps(asdict(LAYOUT)))
        flags = ["--layout", str(layout), "--num-device-blocks", str(NUM_DEVICE_BLOCKS)]
        with Planes(Path(folder), [*flags, "--num-host-blocks", "1"]) as planes:
            num_steps = 100 if arguments.quick else 1000
            latencies = asyncio.run(measure(planes.control.address, num_steps))
    print_table(latencies)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(as_json(latencies), indent=2) + "\n")
    print(f"saved to {arguments.json}")


if __name__ == "__main__":
    main()
