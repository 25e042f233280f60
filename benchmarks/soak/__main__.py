"""Runs ten times more sessions than a pool has room for, twice, between times of normal load.

    python -m benchmarks.soak --seconds 60 --json OUT

A control plane as a process, and engines that each want one sequence after another: a prompt that
nobody else has, then a token every step, until it is finished and freed. In normal load all fit the
pool; in overload most wait in the queue. The data plane is simulated: a step takes
``engine.STEP_S``, and only the control plane's work is measured. Goodput counts the tokens of
finished sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio

from benchmarks.common.report import machine
from benchmarks.control_plane import messages
from benchmarks.control_plane.over_grpc import DataPlane
from benchmarks.soak.engine import MEAN_TOKENS, Counts, Engine
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2_grpc

NUM_NORMAL: Final = 40
OVERLOAD: Final = 10
# Overload comes twice, to distinguish memory that the first one leaves from a leak.
LOADS: Final = (
    ("normal", NUM_NORMAL, 0.1),
    ("overload", NUM_NORMAL * OVERLOAD, 0.35),
    ("normal again", NUM_NORMAL, 0.1),
    ("overload again", NUM_NORMAL * OVERLOAD, 0.35),
    ("normal at last", NUM_NORMAL, 0.1),
)
# Room for the sequences of normal load, and a little for headroom.
NUM_BLOCKS: Final = NUM_NORMAL * (MEAN_TOKENS // messages.BLOCK_SIZE_TOKENS + 1) * 21 // 20
WARM_UP_S: Final = 3.0
START_S: Final = 60.0
SESSIONS_A_CONNECTION: Final = 20
_OWN_CONNECTION: Final = [("grpc.use_local_subchannel_pool", 1)]
_FLAGS: Final = ("--metrics-port", "-1", "--heartbeat-s", "60", "--lease-s", "60")


@dataclass(slots=True)
class Phase:
    """The figures of one load. Latencies are of steps, in milliseconds, memory in bytes."""

    name: str
    num_sessions: int
    seconds: float = 0.0
    goodput_tokens_per_s: float = 0.0
    num_finished: int = 0
    num_yielded: int = 0
    fewest_finished: int = 0
    most_finished: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    rss_bytes: int = 0
    num_descriptors: int = 0


async def soak(address: str, process_id: int, seconds: float) -> list[Phase]:
    """Run each of LOADS for its share of the time."""
    phases = []
    async with DataPlane(address, messages.hello(NUM_BLOCKS, 0)) as plane:
        await plane.report([rpb.RegisterRequest(report=rpb.BlockReport(last=True))])
        for name, num_sessions, share in LOADS:
            phase = Phase(name, num_sessions, seconds * share)
            async with AsyncExitStack() as stack:
                stubs = [
                    session_pb2_grpc.SessionServiceStub(
                        await stack.enter_async_context(
                            grpc.aio.insecure_channel(address, options=_OWN_CONNECTION)
                        )
                    )
                    for _ in range(num_sessions // SESSIONS_A_CONNECTION)
                ]
                await _load(stubs, plane.key, phase)
                _inspect(process_id, phase)
            phases.append(phase)
    return phases


async def _load(stubs: list[Any], key: bytes, phase: Phase) -> None:
    counts, engines = Counts(), []
    for i in range(phase.num_sessions):
        stub = stubs[i % len(stubs)]
        opened = await stub.OpenSession(messages.open_session())
        engines.append(Engine(i + 1, stub, opened.session, key, counts))
    tasks = [asyncio.create_task(engine.run()) for engine in engines]
    await asyncio.sleep(WARM_UP_S)
    counts.is_counting, begin_s = True, time.perf_counter()
    await asyncio.sleep(phase.seconds)
    counts.is_counting, phase.seconds = False, time.perf_counter() - begin_s
    for engine in engines:
        engine.stopping = True
    await asyncio.gather(*tasks)
    phase.num_finished, phase.num_yielded = counts.finished.total(), counts.num_yielded
    phase.goodput_tokens_per_s = counts.num_tokens / phase.seconds
    of_engines = [counts.finished[i] for i in range(1, phase.num_sessions + 1)]
    phase.fewest_finished, phase.most_finished = min(of_engines), max(of_engines)
    cuts = statistics.quantiles(counts.latencies_s, n=100)
    phase.p50_ms, phase.p99_ms = 1e3 * cuts[49], 1e3 * cuts[98]


def _inspect(process_id: int, phase: Phase) -> None:
    """Return the figures of the control plane's process."""
    folder = Path(f"/proc/{process_id}")
    for line in (folder / "status").read_text().splitlines():
        if line.startswith("VmRSS"):
            phase.rss_bytes = int(line.split()[1]) * 1024
    phase.num_descriptors = len([*(folder / "fd").iterdir()])


def run(seconds: float) -> list[Phase]:
    """Start a control plane, and put the loads on it."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "control_plane", "--bind", "127.0.0.1:0", *_FLAGS]
        process = subprocess.Popen(
            [*command, "--port-file", str(port_file)], stderr=subprocess.DEVNULL
        )
        try:
            until_s = time.monotonic() + START_S
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError("the control plane did not start")
                time.sleep(0.02)
            address = f"127.0.0.1:{port_file.read_text().strip()}"
            return asyncio.run(soak(address, process.pid, seconds))
        finally:
            process.terminate()
            process.wait()


def table(phases: list[Phase]) -> str:
    """Return the table in the form of docs/reliability.md."""
    rows = [
        "| load | sessions | goodput, tokens/s | finished by each | yielded | step p50 | p99 |"
        " memory | descriptors |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {p.name} | {p.num_sessions} | {p.goodput_tokens_per_s:.0f} |"
        f" {p.fewest_finished} to {p.most_finished} | {p.num_yielded} | {p.p50_ms:.1f} ms |"
        f" {p.p99_ms:.1f} ms | {p.rss_bytes / 2**20:.0f} MiB | {p.num_descriptors} |"
        for p in phases
    ]
    return "\n".join(rows)


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Overload a control plane for a while.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/soak.json"))
    arguments = parser.parse_args()
    phases = run(arguments.seconds)
    described = machine()
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    print(table(phases))
    report = {"machine": described, "phases": [asdict(phase) for phase in phases]}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
