"""Both planes with Prometheus and Alertmanager, all real processes on loopback.

The files of deploy/prometheus/ are used as they are, but for targets and time: a minute there is a
second here.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.engine_planes import ROOT as ROOT
from tests.e2e.engine_planes import Process, free_port

RULES = ROOT / "deploy" / "prometheus"
PATIENCE_S = 60.0
_MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}
T = TypeVar("T")


def faster(text: str) -> str:
    """Return rules whose durations are a sixtieth."""

    def scaled(match: re.Match[str]) -> str:
        return f"{max(1000, round(1000 * int(match[1]) * _MINUTES[match[2]]))}ms"

    durations = re.compile(r"(?<=[\[ ])(\d+)([smh])(?=[\])\s]|$)", re.MULTILINE)
    return durations.sub(scaled, text)


class MonitoredStack:
    """A context manager: ``control`` and ``data`` are addresses, ``planes`` by name."""

    def __init__(
        self,
        folder: Path,
        control_arguments: Sequence[str] = (),
        data_arguments: Sequence[str] = (),
        *,
        with_alertmanager: bool = True,
    ) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._with_alertmanager = with_alertmanager
        names = ("control_plane", "data_plane", "prometheus", "alertmanager")
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        control = self._plane("control_plane", *control_arguments)
        self.control = control.address
        data_arguments = ("--control-plane", self.control, "--num-threads", "1", *data_arguments)
        data = self._plane("data_plane", *data_arguments)
        self.data = data.address
        self.planes = {"control_plane": control, "data_plane": data}

    def _plane(self, name: str, *arguments: str) -> Process:
        port = self._addresses[name].rpartition(":")[2]
        arguments = ("--metrics-port", port, "--log-level", "warning", *arguments)
        return Process(name, self._folder / f"{name}.log", *arguments)

    def __enter__(self) -> MonitoredStack:
        with self._stack:
            for name, plane in self.planes.items():
                self._stack.callback(plane.stop)
                self.start_plane(name)
            self._start_prometheus()
            if self._with_alertmanager:
                self._start_alertmanager()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start_plane(self, name: str) -> None:
        """Start a plane, or start it again where it was."""
        self.planes[name].start()
        wait_for(lambda: self._get(name, "ready"), lambda said: said == "OK\n", name)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the present series of an expression."""
        return self._ask("query", query=expression)

    def query_range(
        self, expression: str, begin_s: float, end_s: float, step_s: float
    ) -> list[dict[str, Any]]:
        """Return the series of an expression between two times."""
        return self._ask("query_range", query=expression, start=begin_s, end=end_s, step=step_s)

    def _ask(self, what: str, **parameters: Any) -> list[dict[str, Any]]:
        answer = self._get("prometheus", f"api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        result: list[dict[str, Any]] = json.loads(answer)["data"]["result"]
        return result

    def firing(self) -> set[str]:
        """Return Alertmanager's alerts that have not ended."""
        alerts = json.loads(self._get("alertmanager", "api/v2/alerts"))
        return {alert["labels"]["alertname"] for alert in alerts}

    async def until_firing(self, *names: str) -> None:
        fire = set(names).issubset
        await asyncio.to_thread(wait_for, self.firing, fire, f"{names} fire")

    async def until_cleared(self, *names: str) -> None:
        clear = set(names).isdisjoint
        await asyncio.to_thread(wait_for, self.firing, clear, f"{names} have cleared")

    def _start_prometheus(self) -> None:
        config, _, _ = (
            (RULES / "prometheus.yml").read_text().partition("  - job_name: kvplane_engine")
        )
        for target, name in (
            ("control-plane:9101", "control_plane"),
            ("data-plane:9102", "data_plane"),
            ("alertmanager:9093", "alertmanager"),
        ):
            config = config.replace(target, self._addresses[name])
        config = re.sub(r"(_interval): 5s", r"\1: 500ms", config)
        (self._folder / "prometheus.yml").write_text(config)
        for path in (RULES / "rules.yml", RULES / "alerts.yml"):
            (self._folder / path.name).write_text(faster(path.read_text()))
        self._spawn(
            "prometheus",
            f"--config.file={self._folder}/prometheus.yml",
            f"--storage.tsdb.path={self._folder}/tsdb",
            f"--web.listen-address={self._addresses['prometheus']}",
            "--rules.alert.resend-delay=1s",
        )
        scraped = "a scrape of both planes"
        wait_for(lambda: self._get("prometheus", "-/ready"), lambda said: "Ready" in said, scraped)
        wait_for(lambda: self.query("up == 1"), lambda series: len(series) == 2, scraped)

    def _start_alertmanager(self) -> None:
        self._spawn(
            "prometheus-alertmanager",
            f"--config.file={RULES}/alertmanager.yml",
            f"--storage.path={self._folder}/alertmanager",
            f"--web.listen-address={self._addresses['alertmanager']}",
            "--cluster.listen-address=",
        )
        name = "alertmanager"
        wait_for(lambda: self._get(name, "-/ready"), lambda said: said == "OK", name)

    def _spawn(self, program: str, *arguments: str) -> None:
        log = self._stack.enter_context((self._folder / f"{program}.log").open("ab"))
        command = [program, "--log.level=warn", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)

    def _get(self, name: str, path: str) -> str:
        """Return a GET's answer; empty when there is none."""
        try:
            with urllib.request.urlopen(
                f"http://{self._addresses[name]}/{path}", timeout=10
            ) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


def wait_for(ask: Callable[[], T], is_so: Callable[[T], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so(last := ask()):
        assert time.monotonic() < deadline_s, f"not in time: {what}; last: {last!r}"
        time.sleep(0.1)
