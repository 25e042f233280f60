"""Starts planes as processes that end with a block of code, and when this process is killed."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def start(stack: ExitStack, program: str, *flags: str) -> subprocess.Popen[bytes]:
    """Start a program that ends with ``stack``."""
    command = [sys.executable, "-m", program, "--metrics-port", "-1", "--log-level", "error"]
    process = subprocess.Popen([*command, *flags], preexec_fn=_end_with_parent)
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


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
