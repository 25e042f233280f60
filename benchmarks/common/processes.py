"""Starts planes as processes that end with a block of code, and when this process is killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
# Runs in the new process, not between fork and exec: gRPC's threads may be running in this one.
_END_WITH_PARENT: Final = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start(stack: ExitStack, program: str, *flags: str) -> subprocess.Popen[bytes]:
    """Start a program that ends with ``stack``."""
    command = [sys.executable, "-c", _END_WITH_PARENT, program]
    process = subprocess.Popen([*command, "--metrics-port", "-1", "--log-level", "error", *flags])
    stack.callback(_stop, process)
    return process


def start_control_plane(stack: ExitStack, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a control plane on a free port; return its process and its address."""
    port = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "port"
    process = start(
        stack, "control_plane", "--bind", "127.0.0.1:0", "--port-file", str(port), *flags
    )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if port.exists() and (text := port.read_text().strip()):
            return process, f"127.0.0.1:{text}"
        time.sleep(0.02)
    raise RuntimeError("the control plane did not start")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
