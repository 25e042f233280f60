"""Both planes with Prometheus and Alertmanager, all real processes on loopback.

The files of deploy/prometheus/ are used as they are, but for targets and time: a minute there is a
second here.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "prometheus"
PATIENCE_S = 60.0
_MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}


def faster(text: str) -> str:
    """Rules whose durations are a sixtieth."""

    def scaled(match: re.Match[str]) -> str:
        return f"{max(1000, round(1000 * int(match[1]) * _MINUTES[match[2]]))}ms"

    durations = re.compile(r"(?<=[\[ ])(\d+)([smh])(?=[\])\s]|$)", re.MULTILINE)
    return durations.sub(scaled, text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MonitoredStack:
    """A context manager: ``control`` and ``data`` are addresses, ``processes`` by name."""

    def __init__(
        self,
        folder: Path,
        control_arguments: Sequence[str] = (),
        data_arguments: Sequence[str] = (),
        *,
        rules: Callable[[str], str] = faster,
        with_alertmanager: bool = True,
    ) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments = {"control_plane": control_arguments, "data_plane": data_arguments}
        self._ports = {name: free_port() for name in ("c", "d", "cm", "dm", "p", "a")}
        self._rules = rules
        self._with_alertmanager = with_alertmanager
        self._stack = ExitStack()
        self.control = f"127.0.0.1:{self._ports['c']}"
        self.data = f"127.0.0.1:{self._ports['d']}"
        self.prometheus = f"http://127.0.0.1:{self._ports['p']}"
        self.alertmanager = f"http://127.0.0.1:{self._ports['a']}"

    def __enter__(self) -> MonitoredStack:
        with self._stack:
            self.start_plane("control_plane")
            self.start_plane("data_plane")
            self._start_prometheus()
            if self._with_alertmanager:
                self._start_alertmanager()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start_plane(self, name: str) -> None:
        """Start a plane, or start it again where it was."""
        port, metrics_port = (
            (self._ports["c"], self._ports["cm"])
            if name == "control_plane"
            else (self._ports["d"], self._ports["dm"])
        )
        command = [sys.executable, "-m", name, "--bind", f"127.0.0.1:{port}"]
        command += ["--metrics-port", str(metrics_port), "--log-level", "warning"]
        if name == "data_plane":
            command += ["--control-plane", self.control, "--num-threads", "1"]
        self._spawn(name, [*command, *self._arguments[name]])
        wait_for(lambda: get(f"http://127.0.0.1:{metrics_port}/healthz") == "SERVING\n", name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; after SIGKILL it is gone."""
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        return self._ask("query", query=expression)

    def query_range(
        self, expression: str, begin_s: float, end_s: float, step_s: float
    ) -> list[dict[str, Any]]:
        """The series that an expression had between two times."""
        return self._ask("query_range", query=expression, start=begin_s, end=end_s, step=step_s)

    def _ask(self, what: str, **parameters: Any) -> list[dict[str, Any]]:
        answer = get(f"{self.prometheus}/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        result: list[dict[str, Any]] = json.loads(answer)["data"]["result"]
        return result

    def firing(self) -> set[str]:
        """The alerts that Alertmanager has and that have not ended."""
        alerts = json.loads(get(f"{self.alertmanager}/api/v2/alerts"))
        return {alert["labels"]["alertname"] for alert in alerts}

    async def until_firing(self, *names: str) -> None:
        await self._until(lambda: set(names) <= self.firing(), f"{names} fire")

    async def until_cleared(self, *names: str) -> None:
        await self._until(lambda: not set(names) & self.firing(), f"{names} have cleared")

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not await asyncio.to_thread(true):
            assert time.monotonic() < deadline_s, f"not in time: {what}; firing: {self.firing()}"
            await asyncio.sleep(0.2)

    def _start_prometheus(self) -> None:
        config = (RULES / "prometheus.yml").read_text()
        for target, port in (
            ("control-plane:9101", "cm"),
            ("data-plane:9102", "dm"),
            ("alertmanager:9093", "a"),
        ):
            config = config.replace(target, f"127.0.0.1:{self._ports[port]}")
        config = re.sub(r"(_interval): 5s", r"\1: 500ms", config)
        (self.folder / "prometheus.yml").write_text(config)
        for path in (RULES / "rules.yml", RULES / "alerts.yml"):
            (self.folder / path.name).write_text(self._rules(path.read_text()))
        self._spawn(
            "prometheus",
            [
                "prometheus",
                f"--config.file={self.folder}/prometheus.yml",
                f"--storage.tsdb.path={self.folder}/tsdb",
                f"--web.listen-address=127.0.0.1:{self._ports['p']}",
                "--rules.alert.resend-delay=1s",
                "--log.level=warn",
            ],
        )
        wait_for(lambda: "Ready" in get(f"{self.prometheus}/-/ready"), "prometheus")
        wait_for(lambda: len(self.query("up == 1")) == 2, "a scrape of both planes")

    def _start_alertmanager(self) -> None:
        self._spawn(
            "alertmanager",
            [
                "prometheus-alertmanager",
                f"--config.file={RULES}/alertmanager.yml",
                f"--storage.path={self.folder}/alertmanager",
                f"--web.listen-address=127.0.0.1:{self._ports['a']}",
                "--cluster.listen-address=",
                "--log.level=warn",
            ],
        )
        wait_for(lambda: get(f"{self.alertmanager}/-/ready") == "OK", "alertmanager")

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self.processes[name] = process
        self._stack.callback(_stop, process)


def get(url: str) -> str:
    """What a GET answers; empty when nobody does."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError):
        return ""


def wait_for(true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, f"{what} did not start"
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
