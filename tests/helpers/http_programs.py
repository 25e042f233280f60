"""Programs that serve HTTP, an engine or a router, as processes that a test asks and stops."""

from __future__ import annotations

import http.client
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.helpers.programs import Program
from tests.helpers.waiting import wait_until


class HttpProgram:
    """``python -m COMMAND``, which writes its port on loopback to a file. ``headers``: of requests.
    It has to be started.
    """

    process: Program
    port: int

    def __init__(
        self, folder: Path, name: str, *command: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._port_file, self.log = folder / f"{name}.port", folder / f"{name}.log"
        flags = ("--bind", "127.0.0.1:0", "--port-file", str(self._port_file))
        self._command = (*command, *flags)
        self._headers = dict(headers or {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        self.process = Program(*self._command, out=self.log)

    def wait(self) -> None:
        """Wait until it serves."""

        def is_up() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self._port_file.exists()

        wait_until(is_up, 90.0)
        self.port = int(self._port_file.read_text())

    def stop(self) -> int:
        """End it, also one that was stopped by a signal; return its exit code."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        return self.process.wait()

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Return the sum of the samples of /metrics whose lines begin with ``name``."""
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
