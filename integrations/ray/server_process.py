"""A server as a child process, which ends when this process does. Knows nothing of Ray."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Final

_LOGGER: Final = logging.getLogger(__name__)
_POLL_S: Final = 0.02
_ENOUGH: Final = 2
# Runs the command that follows it, which is killed when the thread that started it ends. A separate
# program, because Python must not run between fork and exec where there are threads.
_UNTIL_PARENT_ENDS: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerProcess:
    """Runs a server once, from now on. ``make_command`` is called with the server's port file.
    ``is_useless`` is called every ``check_s`` seconds; when it is true twice in a row, the server
    is ended. ``ended`` is called, in a thread, when it has ended other than by ``stop``, or could
    not be started.
    """

    def __init__(
        self,
        make_command: Callable[[Path], list[str]],
        ended: Callable[[], object],
        is_useless: Callable[[], bool] = lambda: False,
        check_s: float = 5.0,
    ) -> None:
        self._make_command = make_command
        self._ended = ended
        self._is_useless = is_useless
        self._check_s = check_s
        self._stopping = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        """Holds the port of the running process; 0 until it has written its port file."""
        # The kernel counts the thread that starts a child as its parent, so it must not end first.
        self._thread = Thread(target=self._run, name="server-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The running process's id; 0 when there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def stop(self, grace_s: float = 10.0) -> None:
        """End the process, by SIGKILL after ``grace_s``."""
        self._stopping.set()
        self._thread.join(grace_s)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="kvplane-ray-") as folder:
                self._run_until_end(Path(folder) / "port")
        except Exception as error:  # such as a control plane whose address is not known yet
            _LOGGER.warning("not started: %s", error)
        if not self._stopping.is_set():
            self._ended()

    def _run_until_end(self, port_file: Path) -> None:
        command = [sys.executable, "-S", "-c", _UNTIL_PARENT_ENDS, str(os.getpid())]
        command += self._make_command(port_file)
        self._process = process = subprocess.Popen(command)
        checked_s, num_useless = time.monotonic(), 0
        while process.poll() is None and num_useless < _ENOUGH:
            if self._stopping.wait(_POLL_S):
                break
            if self.port == 0 and port_file.exists():
                self.port = int(port_file.read_text() or 0)
            if time.monotonic() - checked_s >= self._check_s:
                num_useless = num_useless + 1 if self._is_useless() else 0
                checked_s = time.monotonic()
        self.port = 0
        if process.poll() is None:
            process.terminate()
            process.wait()
        _LOGGER.warning("pid %d ended with %d", process.pid, process.returncode)
