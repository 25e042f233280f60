"""A child process that is started again whenever it ends, and ends when this process does."""

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
_FIRST_DELAY_S: Final = 0.1
_LONGEST_DELAY_S: Final = 5.0
_LONG_RUN_S: Final = 10.0
_ENOUGH: Final = 2
# Runs the command that follows it, which is killed when the thread that started it ends. A separate
# program, because Python must not run between fork and exec where there are threads.
_UNTIL_PARENT_ENDS: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Supervisor:
    """Runs a process from now on. ``make_command`` is called with a port file before each start.
    ``is_useless`` is called now and then; when it is true twice in a row, the process is restarted.
    """

    def __init__(
        self,
        make_command: Callable[[Path], list[str]],
        is_useless: Callable[[], bool] = lambda: False,
        check_s: float = 5.0,
    ) -> None:
        self._make_command = make_command
        self._is_useless = is_useless
        self._check_s = check_s
        self._stopping = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.port = 0
        """Of the running process; 0 until it has written its port file."""
        # The kernel counts the thread that starts a child as its parent, so it must not end first.
        self._thread = Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The running process's id; 0 when there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def stop(self, grace_s: float = 10.0) -> None:
        """End the process, by SIGKILL after ``grace_s``, and do not start it again."""
        self._stopping.set()
        self._thread.join(grace_s)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        with tempfile.TemporaryDirectory(prefix="kvplane-ray-") as folder:
            port_file = Path(folder) / "port"
            while not self._stopping.is_set():
                began_s = time.monotonic()
                try:
                    self._run_once(port_file)
                except Exception as error:  # such as a control plane whose address is not known yet
                    _LOGGER.warning("not started: %s", error)
                if time.monotonic() - began_s > _LONG_RUN_S:
                    delay_s = _FIRST_DELAY_S
                self._stopping.wait(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _run_once(self, port_file: Path) -> None:
        """Run the process from start to end."""
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-S", "-c", _UNTIL_PARENT_ENDS, str(os.getpid())]
        command += self._make_command(port_file)
        self._process = process = subprocess.Popen(command)
        self.num_starts += 1
        try:
            checked_s, num_useless = time.monotonic(), 0
            while process.poll() is None and num_useless < _ENOUGH:
                if self._stopping.wait(_POLL_S):
                    break
                if self.port == 0 and port_file.exists():
                    self.port = int(port_file.read_text() or 0)
                if time.monotonic() - checked_s >= self._check_s:
                    num_useless = num_useless + 1 if self._is_useless() else 0
                    checked_s = time.monotonic()
        finally:
            self.port = 0
        if process.poll() is None:
            process.terminate()
            process.wait()
        _LOGGER.warning("pid %d ended with %d", process.pid, process.returncode)
