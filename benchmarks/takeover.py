"""Measures how long a fleet has no control plane when the leader dies or hangs.

    python -m benchmarks.takeover [--election SPEC] [--how kill stop] [--rounds N] [--ttl-s N]
                                  [--json OUT]

Two control planes and a data plane are processes of their own on loopback. SPEC is that of
``python -m control_plane --election``; a file by default. A client with both addresses polls for
the leader. Timed from the signal: until the next leader answers it (takeover), and until sessions
can be opened on the pool (ready). The next leader is ended only once the other stands by: a
starting process can't take over. "kill" is SIGKILL; "stop" is SIGSTOP, which only the end of the
lease reveals. A file has no lease: the holder of its lock leads while it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common.report import machine, markdown, said, save
from benchmarks.common.timing import quantile
from kvplane import ControlClient, LayerGroup, Layout
from kvplane.clients.control_client import CONTROL_PLANE_SERVICE
from kvplane.errors import KvplaneError
from kvplane.transport.health import check
from kvplane.transport.tls import open_channel
from kvplane.wire.v1.pool_pb2 import GetServerInfoRequest
from kvplane.wire.v1.pool_pb2_grpc import ServerServiceStub
from scripts.planes import start

KILL_GOAL_S = 0.05  # for the p95; after "stop" it is the lease and STOP_GOAL_S
STOP_GOAL_S = 0.5
HEADS = ("how", "takeover, min", "p50", "p95", "goal", "ready, p50", "max", "is met")
QUIET = ("--metrics-port", "-1", "--log-level", "error")
LAYOUT = Layout("takeover", 16, "float32", "float32", (LayerGroup("full", (0,), 1, 8),))


class ControlPlanes:
    """Two candidates, either of which can be started again."""

    def __init__(self, stack: ExitStack, election: str, ttl_s: int) -> None:
        self._stack = stack
        self._flags = (*QUIET, "--election", election, "--election-ttl-s", str(ttl_s))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.addresses: list[str] = []
        for _ in range(2):
            process, address = start(stack, "control_plane", *self._flags)
            self.processes.append(process)
            self.addresses.append(address)

    async def wait_for_standby(self, index: int) -> None:
        """Wait until it stands by, and has connected to the leader."""
        while True:
            try:
                if await check(self.addresses[index], timeout_s=0.2) == "NOT_SERVING":
                    break
            except KvplaneError:
                pass
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    def restart(self, index: int) -> None:
        """End it for good, and start it again."""
        self.processes[index].kill()  # also if it is stopped
        self.processes[index].wait()
        bind = self.addresses[index]
        self.processes[index] = start(self._stack, "control_plane", *self._flags, bind=bind).process


async def leader_of(addresses: Sequence[str]) -> int:
    """Wait until one of these control planes leads; return which."""
    while True:
        for i, address in enumerate(addresses):
            async with ControlClient(address, timeout_s=0.2) as client:
                try:
                    await client.get_server_info()
                    return i
                except KvplaneError:
                    await asyncio.sleep(0.05)


async def until_another_leads(addresses: str, end: Callable[[], None]) -> float:
    """Call ``end``, which ends the leader; return the seconds until the next one answers.
    ``addresses``: of all control planes, with commas.
    """
    async with open_channel(addresses, None, health_of=CONTROL_PLANE_SERVICE) as channel:
        ask, request = ServerServiceStub(channel).GetServerInfo, GetServerInfoRequest()
        before = (await ask(request, wait_for_ready=True, timeout=30)).incarnation
        end()
        began_s = time.monotonic()
        while True:
            try:
                if (await ask(request, timeout=0.25)).incarnation > before:
                    return time.monotonic() - began_s
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.002)


async def one_round(planes: ControlPlanes, how: str) -> tuple[float, float]:
    """Return the seconds until another leads, and until the pool is ready."""
    leader = await leader_of(planes.addresses)
    signal_number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
    addresses = ",".join(planes.addresses)
    async with ControlClient(addresses) as client:
        await client.wait_ready("pool", 60)
        await planes.wait_for_standby(1 - leader)
        took_over_s = await until_another_leads(
            addresses, lambda: os.kill(planes.processes[leader].pid, signal_number)
        )
        led_s = time.monotonic()
        await client.wait_ready("pool", 60)
        ready_s = took_over_s + time.monotonic() - led_s
    planes.restart(leader)
    return took_over_s, ready_s


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all rounds; return a row for each way to end, as in the JSON."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        election = options.election or f"file:{folder}/leader"
        planes = ControlPlanes(stack, election, options.ttl_s)
        layout = folder / "layout.json"
        layout.write_text(json.dumps(asdict(LAYOUT)))
        flags = ("--control-plane", ",".join(planes.addresses), "--layout", str(layout))
        flags += ("--pool-id", "pool", "--num-device-blocks", "64")
        start(stack, "data_plane", *QUIET, *flags)
        for how in options.how:
            times = [asyncio.run(one_round(planes, how)) for _ in range(options.rounds)]
            took, ready = ([each[i] for each in times] for i in (0, 1))
            goal_s = KILL_GOAL_S if how == "kill" else options.ttl_s + STOP_GOAL_S
            yield {"how": how, "goal_p95_s": goal_s, "takeover_s": took, "ready_s": ready}


def cells(row: dict[str, Any]) -> list[str]:
    """Return a line of the table, in seconds."""
    took, ready = row["takeover_s"], row["ready_s"]
    p95_s, goal_s = quantile(took, 0.95), row["goal_p95_s"]
    figures = (min(took), quantile(took, 0.5), p95_s, goal_s, quantile(ready, 0.5), max(ready))
    is_met = "met" if p95_s <= goal_s else "missed"
    return [row["how"], *(f"{figure:.3f}" for figure in figures), is_met]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--election", help="default: a file")
    parser.add_argument("--how", nargs="+", default=["kill"], choices=("kill", "stop"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ttl-s", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    record = {"machine": machine(), "election": options.election or "file", "rows": rows}
    print(f"{said(machine())}; {options.rounds} rounds each, lease {options.ttl_s} s; seconds")
    for row in measure(options):
        rows.append(row)
        save(options.json, record)  # after each row: the next may take minutes
    print(*markdown(HEADS, map(cells, rows)), sep="\n")


if __name__ == "__main__":
    main()
