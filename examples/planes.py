"""Runs both planes as processes of their own for the duration of a block of code.

They end with it, however it ends: also when this process is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from kvplane.errors import InvalidRequestError, PlaneUnavailableError

ROOT: Final = Path(__file__).resolve().parent.parent
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0
CONTROL_PLANE: Final = ("-m", "control_plane")
DATA_PLANE: Final = ("-m", "data_plane")
_POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_SETTINGS: Final = ("KVPLANE_CONTROL_PLANE_", "KVPLANE_DATA_PLANE_")


@dataclass(slots=True)
class Plane:
    """A running plane. ``address`` and ``metrics_url`` are on loopback."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    address: str = ""
    metrics_url: str = ""

    def metrics(self) -> dict[str, float]:
        """Return its present metrics: ``name{labels}`` to value, in Prometheus' reading."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


class Planes:
    """A context manager that starts a control plane and a data plane and stops them at its end.

    Ports are free ones. Logs go to ``run_folder``. ``data_arguments``: the data plane's flags,
    except addresses. ``data_plane``: the interpreter's arguments that run the data plane.
    ``interpreter``: the command that runs Python.

    Raises PlaneUnavailableError naming the log when one does not come up, InvalidRequestError when
    the logs cannot be written.
    """

    def __init__(
        self,
        run_folder: Path,
        data_arguments: Sequence[str],
        data_plane: Sequence[str] = DATA_PLANE,
        interpreter: Sequence[str] = (sys.executable,),
    ) -> None:
        self._run_folder = run_folder
        self._data_arguments = data_arguments
        self._data_plane = data_plane
        self._interpreter = interpreter
        self._stack = ExitStack()

    def __enter__(self) -> Planes:
        with self._stack:
            ports = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self.control = self._start("control_plane", CONTROL_PLANE, ports, [])
            arguments = ["--control-plane", self.control.address, *self._data_arguments]
            self.data = self._start("data_plane", self._data_plane, ports, arguments)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(
        self, name: str, program: Sequence[str], ports: Path, arguments: Sequence[str]
    ) -> Plane:
        port_file, metrics_port = ports / name, _free_port()
        log = self._run_folder / f"{name}.log"
        output = self._stack.enter_context(self._open_log(log))
        command = [*self._interpreter, *program, "--bind", "127.0.0.1:0"]
        command += ["--port-file", str(port_file), "--metrics-port", str(metrics_port)]
        plane = Plane(name, _spawn([*command, *arguments], output), log)
        self._stack.callback(stop, plane.process)
        plane.address = f"127.0.0.1:{_wait_for_port(port_file, plane)}"
        plane.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        return plane

    def _open_log(self, log: Path) -> IO[bytes]:
        try:
            self._run_folder.mkdir(parents=True, exist_ok=True)
            return log.open("wb")
        except OSError as error:
            reason = f"{log} cannot be written: {error.strerror}"
            raise InvalidRequestError(reason, field="run_folder") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a child whose settings are its flags alone, and that Ctrl-C does not reach."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """Make the kernel kill this child if the parent dies without having stopped it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_port(file: Path, plane: Plane) -> int:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if plane.process.poll() is not None:
            break
        if file.exists() and (text := file.read_text().strip()):
            return int(text)
        time.sleep(_POLL_S)
    raise PlaneUnavailableError(f"{plane.name} did not start; see {plane.log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL if that does not help."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
