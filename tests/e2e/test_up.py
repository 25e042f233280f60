"""``kvplane up``: a model over HTTP until it is told to stop, and no process longer than others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_planes import ROOT, free_port

from tests.helpers.programs import run

README = (ROOT / "README.md").read_text()
CLIENT = re.findall(r"```python\n(from openai.*?)```", README, re.DOTALL)[0]
SERVERS = ("CONTROL_PLANE", "DATA_PLANE", "ENGINE_SERVE")
COMMAND = [sys.executable, "-m", "kvplane", "up", "--model", "models/recall", "--memory", "16MiB"]


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    binds = {f"KVPLANE_{name}_BIND": f"127.0.0.1:{free_port()}" for name in SERVERS}
    off = {f"KVPLANE_{name}_METRICS_PORT": "-1" for name in SERVERS}
    return {**os.environ, **binds, **off, "KVPLANE_CONTROL_PLANE_PAGE_PORT": str(free_port())}


@pytest.fixture
def up(environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The command, once it has said that all serve."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(COMMAND, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            assert process.stdout is not None and process.stderr is not None
            is_up = any("Ctrl-C" in line for line in process.stdout)
            assert is_up, process.stderr.read()
            yield process
        finally:
            process.terminate()
            process.wait(60)


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """Process ids of the programs by their modules' names."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found[words[words.index(b"-c") + 3].decode()] = int(pid)
    return found


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.nightly  # starts all programs once more
def test_a_plane_that_dies_ends_the_others_with_exit_code_1(up: subprocess.Popen[str]) -> None:
    running = children(up)
    os.kill(running["data_plane"], signal.SIGKILL)
    assert up.wait(60) == 1
    assert not any(map(is_running, running.values()))
    assert up.stderr is not None
    *_, said = up.stderr
    assert said == "kvplane up: error: the data plane ended with exit code -9\n"


def test_it_answers_until_a_signal_ends_all_with_exit_code_0(
    up: subprocess.Popen[str], environ: dict[str, str]
) -> None:
    running = children(up)
    assert set(running) == {"control_plane", "data_plane", "kvplane.engine"}
    done = run("-c", CLIENT.replace("127.0.0.1:8000", environ["KVPLANE_ENGINE_SERVE_BIND"]))
    assert (done.stdout, done.stderr) == ("xyz 0\nxyz 16\n", "")
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert not any(map(is_running, running.values()))
