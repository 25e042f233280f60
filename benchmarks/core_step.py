"""Measures a step inside the control plane: the core in this process, from the request to the
answer, with receipts verified and the plan encoded and signed.

    python -m benchmarks.core_step [--quick] [--no-gc] [--json OUT]

There is no socket, and making requests and reading answers is not timed. Every step has content of
its own, so nothing is memoised. ``--no-gc`` turns the garbage collector off, which shows its share.
"""

from __future__ import annotations

import argparse
import array
import gc
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.planning.config import CoreConfig
from control_plane.planning.core import ControlPlane
from kvplane import ops, protocol, signing
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

BLOCK_SIZE_TOKENS = 16
PROMPT_TOKENS = 32_768
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE_TOKENS
NUM_DEVICE_BLOCKS = 100_000
DECODE_SEQUENCES = 256
POOL, TENANT, EPOCH = "benchmark", "tenant", 1
LAYOUT = Layout(
    model_id="benchmark",
    block_size_tokens=BLOCK_SIZE_TOKENS,
    dtype="float32",
    kv_dtype="float32",
    groups=(LayerGroup("full", (0,), num_kv_heads=1, head_size=8),),
)


@dataclass(frozen=True)
class Row:
    """Latencies of one kind of step, in seconds."""

    name: str
    seconds: Sequence[float]


class Engine:
    """One session on a pool of its own. Every plan gets its receipt immediately."""

    def __init__(self) -> None:
        self._core = ControlPlane(
            incarnation=1, config=CoreConfig(lease_s=3600.0), clock=time.monotonic
        )
        hello = cpb.Hello(
            pool_id=POOL,
            shard=tpb.Shard(num_shards=1, num_layers=1, num_kv_heads=1),
            epoch=EPOCH,
            layout=LAYOUT.to_proto(),
            num_device_blocks=NUM_DEVICE_BLOCKS,
            address="localhost:1",
        )
        self._key = self._core.register(hello).key
        self._core.report(POOL, 0, EPOCH, cpb.BlockReport(last=True))
        request = cpb.OpenSessionRequest(pool_id=POOL, layout=LAYOUT.to_proto())
        self._session = self._core.open_session(request, TENANT).session
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._receipts: list[tpb.SignedPayload] = []

    def new_ids(self, num: int) -> list[int]:
        """Sequence ids that were not used before."""
        return list(itertools.islice(self._ids, num))

    def step(self, *operations: cpb.Operation) -> float:
        """Seconds of a step that carries the receipt of the last one."""
        number = next(self._numbers)
        receipts, self._receipts = self._receipts, []
        request = cpb.StepRequest(
            session=self._session, number=number, operations=operations, receipts=receipts
        )
        began = time.perf_counter()
        result = self._core.step(request, TENANT)
        seconds = time.perf_counter() - began
        self._take(number, result)
        return seconds

    def settle(self) -> float:
        """Seconds to apply the receipt of the last step, which queues publications."""
        receipts, self._receipts = self._receipts, []
        request = cpb.SubmitReceiptsRequest(
            session=self._session, number=next(self._numbers), receipts=receipts
        )
        began = time.perf_counter()
        self._core.submit_receipts(request, TENANT)
        return time.perf_counter() - began

    def announce(self) -> float:
        """Seconds to make and serialise the messages queued for the data plane."""
        began = time.perf_counter()
        for outgoing in self._core.take_outgoing(POOL, 0):
            outgoing.SerializeToString()
        return time.perf_counter() - began

    def num_cached_blocks(self) -> int:
        """Evictable blocks of the device tier."""
        return self._core.describe_pool(POOL).usage.tiers[0].num_cached_blocks

    def _take(self, number: int, result: cpb.StepResult) -> None:
        if any(operation.failures for operation in result.results):
            raise RuntimeError(f"the pool is too small for this benchmark: {result.results}")
        self._core.take_outgoing(POOL, 0)
        if result.HasField("plan"):
            self._receipts.append(self._receipt(number, result.plan))

    def _receipt(self, number: int, plan: tpb.SignedPayload) -> tpb.SignedPayload:
        payload = tpb.Receipt(
            version=protocol.PAYLOAD_VERSION,
            session=self._session,
            pool_id=POOL,
            epoch=EPOCH,
            plan_number=number,
            plan_digest=signing.digest(plan.payload),
        ).SerializeToString()
        signature = signing.sign(self._key, signing.RECEIPT, payload)
        return tpb.SignedPayload(type=signing.RECEIPT, payload=payload, signature=signature)


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> bytes:
    """Packed token ids, which differ from those of any other seed in the first block already."""
    return array.array("i", [seed, *range(1, num_tokens)]).tobytes()


def measure_prompts_not_cached(num_steps: int) -> list[Row]:
    """A new prompt each time: admitted, published by its receipt, freed."""
    engine = Engine()
    admit_s, publish_s, announce_s, free_s = [], [], [], []
    for sequence_id in engine.new_ids(num_steps):
        admit_s.append(engine.step(ops.admit(sequence_id, prompt(sequence_id))))
        publish_s.append(engine.settle())
        announce_s.append(engine.announce())
        free_s.append(engine.step(ops.free([sequence_id])))
        engine.settle()
    return [
        Row("prompt, nothing cached: admit", admit_s),
        Row("prompt, nothing cached: receipt, publish", publish_s),
        Row("prompt, nothing cached: announce", announce_s),
        Row("prompt: free", free_s),
    ]


def measure_prompt_in_use(num_steps: int) -> list[Row]:
    """A prompt that another sequence holds all the time."""
    engine = Engine()
    holder, *others = engine.new_ids(1 + num_steps)
    tokens = prompt(0)
    engine.step(ops.admit(holder, tokens))
    engine.settle()
    admit_s = []
    for sequence_id in others:
        admit_s.append(engine.step(ops.admit(sequence_id, tokens)))
        engine.settle()
        engine.step(ops.free([sequence_id]))
        engine.settle()
    return [Row("prompt, all cached, in use: admit", admit_s)]


def measure_prompt_evictable(num_steps: int) -> list[Row]:
    """A prompt that no sequence holds: all its blocks are evictable, and are allocated again."""
    engine = Engine()
    tokens = prompt(0)
    admit_s = []
    for i, sequence_id in enumerate(engine.new_ids(1 + num_steps)):
        seconds = engine.step(ops.admit(sequence_id, tokens))
        engine.settle()
        engine.step(ops.free([sequence_id]))
        engine.settle()
        if engine.num_cached_blocks() != PROMPT_BLOCKS:
            raise RuntimeError("the prompt's blocks are not all evictable")
        if i:
            admit_s.append(seconds)
    return [Row("prompt, all cached, evictable: admit", admit_s)]


def measure_decode(num_steps: int) -> list[Row]:
    """One token for each of many sequences, a sixteenth of which needs a block in each step."""
    engine = Engine()
    ids = engine.new_ids(DECODE_SEQUENCES)
    lengths = [BLOCK_SIZE_TOKENS + i % BLOCK_SIZE_TOKENS for i in range(DECODE_SEQUENCES)]
    for sequence_id, num_tokens in zip(ids, lengths, strict=True):
        engine.step(ops.admit(sequence_id, prompt(sequence_id, num_tokens)))
    ones = [1] * DECODE_SEQUENCES
    decode_s = []
    for token in range(num_steps):
        first_positions = [num_tokens + token for num_tokens in lengths]
        packed = ops.pack_tokens([token] * DECODE_SEQUENCES)
        append = ops.appends(ids, first_positions, ones, ones, packed)
        decode_s.append(engine.step(append))
    return [Row(f"decode step of {DECODE_SEQUENCES} sequences", decode_s)]


MEASUREMENTS: tuple[tuple[Callable[[int], list[Row]], int], ...] = (
    (measure_prompts_not_cached, 200),
    (measure_prompt_in_use, 200),
    (measure_prompt_evictable, 200),
    (measure_decode, 1000),
)


def quantile_us(seconds: Sequence[float], quantile: float) -> float:
    """A quantile by the nearest rank, in microseconds."""
    ordered = sorted(seconds)
    return 1e6 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def cpu_name() -> str:
    """The processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """The machine that this runs on."""
    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "gc": "on" if gc.isenabled() else "off",
    }


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """The figures of the table, for programs."""
    return {
        "machine": machine(),
        "rows": [
            {
                "name": row.name,
                "unit": "us",
                "num_samples": len(row.seconds),
                "p50": round(quantile_us(row.seconds, 0.5), 1),
                "p99": round(quantile_us(row.seconds, 0.99), 1),
            }
            for row in rows
        ],
    }


def print_table(rows: Sequence[Row]) -> None:
    """One line for each row, in microseconds."""
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"prompt of {PROMPT_TOKENS:,} tokens in blocks of {BLOCK_SIZE_TOKENS}")
    print(f"{'microseconds':44}{'p50':>10}{'p99':>10}")
    for row in rows:
        cells = [quantile_us(row.seconds, q) for q in (0.5, 0.99)]
        print(f"{row.name:44}" + "".join(f"{cell:>10,.0f}" for cell in cells))


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the core's steps in process.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--no-gc", action="store_true", help="turn the garbage collector off")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/core_step.json"))
    arguments = parser.parse_args()
    if arguments.no_gc:
        gc.disable()
    rows: list[Row] = []
    for measure, num_steps in MEASUREMENTS:
        rows += measure(num_steps // 10 if arguments.quick else num_steps)
        gc.collect()
    print_table(rows)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(as_json(rows), indent=2) + "\n")
    print(f"saved to {arguments.json}")


if __name__ == "__main__":
    main()
