"""``kvplane up``: both planes and the HTTP server of a model, each a process, until a signal.

Exit codes: 0 stopped by signal, 1 one of them ended by itself, 2 bad settings.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Final

from kvplane.models.config import require_folder
from kvplane.serving.config import ANY_HOST
from kvplane.serving.settings import Settings, parse, setting

_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02
_DEFAULTS: Final = {
    "KVPLANE_CONTROL_PLANE_BIND": "127.0.0.1:50051",
    "KVPLANE_CONTROL_PLANE_PAGE_PORT": "9103",
    "KVPLANE_DATA_PLANE_BIND": "127.0.0.1:50052",
    "KVPLANE_ENGINE_SERVE_BIND": "127.0.0.1:8000",
    # The data plane's log says how many tokens its memory holds.
} | {f"KVPLANE_{name}_LOG_LEVEL": "warning" for name in ("CONTROL_PLANE", "ENGINE_SERVE")}
# Runs in the new process, not between fork and exec: gRPC's threads may be running in this one.
_END_WITH_PARENT: Final = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the process that started this one has ended")
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, kw_only=True)
class UpSettings(Settings):
    """Serve a model to OpenAI's clients: start both planes and the HTTP server, until Ctrl-C. Their
    other settings are taken from their variables, such as KVPLANE_ENGINE_SERVE_BIND.
    """

    HEADING: ClassVar[str] = "The model"

    model: Path = setting(help="Folder of a Hugging Face model.")
    memory: str = setting("2GiB", help="Memory of the pool: as of kvplane data --memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder(self.model)


class Process:
    """A program that ends with an ExitStack, and when this process is killed. Ctrl-C does not reach
    it.
    """

    def __init__(
        self,
        stack: ExitStack,
        module: str,
        *arguments: str,
        bind: str,
        environ: Mapping[str, str],
        python: Sequence[str] = (sys.executable,),
        output: IO[bytes] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start ``python -m module arguments``, which serves at ``bind``. ``output``: where it
        writes; by default where this process does.
        """
        self._host = bind.rpartition(":")[0]
        self._port_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "port"
        serving = ("--bind", bind, "--port-file", str(self._port_file))
        self.popen = subprocess.Popen(
            [*python, "-c", _END_WITH_PARENT, str(os.getpid()), module, *arguments, *serving],
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            process_group=0,  # a session of its own would be scheduled apart
        )
        stack.callback(self._stop)

    def wait(self, gives_up: Callable[[], bool]) -> str | None:
        """Wait until it serves; return its address, "host:port". None once ``gives_up`` is true."""
        while not gives_up():
            if self._port_file.exists():
                return f"{self._host}:{self._port_file.read_text().strip()}"
            time.sleep(_POLL_S)
        return None

    def _stop(self) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


def main() -> int:
    """Run ``kvplane up``. Returns the exit code."""
    config = parse(UpSettings, "up", sys.argv[1:], os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with ExitStack() as stack:
        return _run(stack, config, {**_DEFAULTS, **os.environ})


def _run(stack: ExitStack, config: UpSettings, environ: Mapping[str, str]) -> int:
    """Start the control plane, then the others, which import for seconds, side by side. Returns 1
    when one has ended.
    """
    host, _, port = environ["KVPLANE_CONTROL_PLANE_BIND"].rpartition(":")
    control = f"{'127.0.0.1' if host in ANY_HOST else host}:{port}"
    shared = ("--control-plane", control, "--model", str(config.model))
    programs = {
        "control plane": ("CONTROL_PLANE", "control_plane"),
        "data plane": ("DATA_PLANE", "data_plane", *shared, "--memory", config.memory),
        "HTTP server": ("ENGINE_SERVE", "kvplane.engine", "serve", *shared),
    }
    running: dict[str, Process] = {}
    for names in (["control plane"], ["data plane", "HTTP server"]):
        for name in names:
            program, *words = programs[name]
            bind = environ[f"KVPLANE_{program}_BIND"]
            running[name] = Process(stack, *words, bind=bind, environ=environ)
        for name in names:
            address = running[name].wait(lambda: _one_has_ended(running))
            if address is None:
                return 1
            print(f"{name:13}  {address}", flush=True)
    print(f"page           http://127.0.0.1:{environ['KVPLANE_CONTROL_PLANE_PAGE_PORT']}")
    print("Ctrl-C stops all.", flush=True)
    while not _one_has_ended(running):
        time.sleep(_POLL_S)
    return 1


def _one_has_ended(running: Mapping[str, Process]) -> bool:
    """Return whether a program has ended; say which."""
    for name, process in running.items():
        if (code := process.popen.poll()) is not None:
            sys.stderr.write(f"kvplane up: error: the {name} ended with exit code {code}\n")
            return True
    return False
