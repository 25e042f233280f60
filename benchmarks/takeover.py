"""Measures how long a fleet has no control plane when the leader dies or hangs.

    python -m benchmarks.takeover [--election file etcd] [--how kill stop] [--rounds N] [--ttl-s N]
                                  [--etcd-folder FOLDER...] [--json OUT]

Two control planes and a data plane are processes of their own, etcd is three members, all on
loopback. A client with both addresses polls for the leader. Timed from the signal: until the next
leader answers it (takeover), and until sessions can be opened on the pool (ready). The next leader
is ended only once the other stands by: a starting process can't take over. etcd writes each change
to two members' disks before it answers, which a takeover waits for; ``--etcd-folder /dev/shm``
leaves disks out. Several folders are each measured. "kill" is SIGKILL; "stop" is SIGSTOP, after
which only the lease's expiry reveals the failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common.report import machine, said, save
from benchmarks.common.timing import quantile
from kvplane import ControlClient, LayerGroup, Layout
from kvplane.clients.control_client import CONTROL_PLANE_SERVICE
from kvplane.errors import KvplaneError
from kvplane.transport.health import check
from kvplane.transport.tls import open_channel
from kvplane.wire.v1.pool_pb2 import GetServerInfoRequest
from kvplane.wire.v1.pool_pb2_grpc import ServerServiceStub
from tests.helpers.etcd_cluster import EtcdCluster

KILL_GOAL_S = 0.05  # for the p95; after "stop" it is the lease and STOP_GOAL_S
STOP_GOAL_S = 0.5
LAYOUT = Layout("takeover", 16, "float32", "float32", (LayerGroup("full", (0,), 1, 8),))


class ControlPlanes:
    """Two candidates, either of which can be started again."""

    def __init__(self, stack: ExitStack, folder: Path, election: str, ttl_s: int) -> None:
        self._command = [
            *(sys.executable, "-m", "control_plane", "--metrics-port", "-1"),
            *("--election", election, "--election-ttl-s", str(ttl_s), "--log-level", "error"),
        ]
        self._folder = folder
        self._binds = ["127.0.0.1:0", "127.0.0.1:0"]
        self.processes = [self._start(i) for i in range(2)]
        stack.callback(self._stop)
        for i in range(2):
            while not (folder / f"port{i}").exists():
                time.sleep(0.05)
            self._binds[i] = f"127.0.0.1:{(folder / f'port{i}').read_text().strip()}"

    @property
    def addresses(self) -> str:
        return ",".join(self._binds)

    async def leader(self) -> int:
        """Wait until one of the two leads; return which."""
        while True:
            for i, address in enumerate(self._binds):
                async with ControlClient(address, timeout_s=0.2) as client:
                    try:
                        await client.get_server_info()
                        return i
                    except KvplaneError:
                        await asyncio.sleep(0.05)

    async def wait_for_standby(self, index: int) -> None:
        """Wait until it stands by, and has connected to the leader."""
        while True:
            try:
                if await check(self._binds[index], timeout_s=0.2) == "NOT_SERVING":
                    break
            except KvplaneError:
                pass
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    def restart(self, index: int) -> None:
        """End it for good, and start it again."""
        self.processes[index].send_signal(signal.SIGCONT)
        self.processes[index].kill()
        self.processes[index].wait()
        self.processes[index] = self._start(index)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        port = ["--port-file", str(self._folder / f"port{index}")]
        return subprocess.Popen([*self._command, "--bind", self._binds[index], *port])

    def _stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


async def one_round(planes: ControlPlanes, how: str) -> tuple[float, float]:
    """Return the seconds until another leads, and until the pool is ready."""
    leader = await planes.leader()
    async with (
        ControlClient(planes.addresses) as client,
        open_channel(planes.addresses, None, health_of=CONTROL_PLANE_SERVICE) as channel,
    ):
        ask = ServerServiceStub(channel).GetServerInfo
        request = GetServerInfoRequest()
        await client.wait_ready("pool", 60)
        await planes.wait_for_standby(1 - leader)
        before = (await ask(request)).incarnation
        os.kill(planes.processes[leader].pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        began_s = time.monotonic()
        while True:
            try:
                if (await ask(request, timeout=0.25)).incarnation > before:
                    break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.002)
        took_over_s = time.monotonic() - began_s
        await client.wait_ready("pool", 60)
        ready_s = time.monotonic() - began_s
    planes.restart(leader)
    return took_over_s, ready_s


def measure(
    kind: str, ttl_s: int, hows: list[str], rounds: int, etcd_folder: str | None
) -> Iterator[dict[str, Any]]:
    """Run all rounds with one elector; return a row for each way to end, as in the JSON."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        election = f"file:{folder}/leader"
        if kind == "etcd":
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=etcd_folder)))
            etcd = stack.enter_context(EtcdCluster(disk, 3))
            election = f"etcd://{etcd.endpoints}/takeover"
        planes = ControlPlanes(stack, folder, election, ttl_s)
        layout = folder / "layout.json"
        layout.write_text(json.dumps(asdict(LAYOUT)))
        data = subprocess.Popen(
            [
                *(sys.executable, "-m", "data_plane", "--bind", "127.0.0.1:0", "--metrics-port"),
                *("-1", "--control-plane", planes.addresses, "--layout", str(layout)),
                *("--pool-id", "pool", "--num-device-blocks", "64", "--log-level", "error"),
            ]
        )
        stack.callback(data.wait)
        stack.callback(data.kill)
        for how in hows:
            if kind == "file" and how == "stop":
                continue  # the holder of the lock leads
            times = [asyncio.run(one_round(planes, how)) for _ in range(rounds)]
            took, ready = ([each[i] for each in times] for i in (0, 1))
            yield {
                "elector": kind,
                "etcd_folder": etcd_folder,
                "how": how,
                "goal_p95_s": KILL_GOAL_S if how == "kill" else ttl_s + STOP_GOAL_S,
                "takeover_p95_s": quantile(took, 0.95),
                "takeover_s": took,
                "ready_s": ready,
            }


def line_of(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    took, ready = row["takeover_s"], row["ready_s"]
    held = "yes" if row["takeover_p95_s"] <= row["goal_p95_s"] else "no"
    return (
        f"{row['elector']:<6} {row['how']:<5} {min(took):>9.3f} {quantile(took, 0.5):>7.3f} "
        f"{row['takeover_p95_s']:>7.3f} {row['goal_p95_s']:>6.2f} {held:>5} "
        f"{quantile(ready, 0.5):>10.3f} {max(ready):>7.3f}  {row['etcd_folder'] or ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--election", nargs="+", default=["file", "etcd"])
    parser.add_argument("--how", nargs="+", default=["kill", "stop"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ttl-s", type=int, default=5)
    parser.add_argument(
        "--etcd-folder",
        nargs="+",
        default=[tempfile.gettempdir()],
        help="where etcd's members have their data",
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    if "etcd" in options.election and shutil.which("etcd") is None:
        sys.exit("etcd is not installed (apt install etcd-server etcd-client)")
    rows: list[dict[str, Any]] = []
    record = {"machine": machine(), "ttl_s": options.ttl_s, "rows": rows}
    print(f"{said(machine())}; {options.rounds} rounds each, lease {options.ttl_s} s; seconds")
    print("                 takeover                             ready")
    print("elector how         min     p50     p95   goal  held        p50     max  etcd's data")
    for kind in options.election:
        for folder in options.etcd_folder if kind == "etcd" else [None]:
            for row in measure(kind, options.ttl_s, options.how, options.rounds, folder):
                print(line_of(row), flush=True)
                rows.append(row)
                save(options.json, record)  # after each row: the next may take minutes


if __name__ == "__main__":
    main()
