"""Programs that can not start say why in a line, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_planes import ROOT

from kvplane.errors import InvalidRequestError
from scripts.planes import run_planes


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize("program", ["control_plane", "data_plane"])
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--bind", "127.0.0.1:{port}"], "cannot listen on 127.0.0.1:{port}"),
        (
            ["--bind", "127.0.0.1:0", "--metrics-port", "{port}"],
            "cannot serve metrics on 127.0.0.1:{port}: Address already in use",
        ),
        pytest.param(
            ["--bind", "127.0.0.1:0", "--port-file", "/proc/no/port"],
            "cannot write port_file /proc/no/port: No such file or directory",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_plane_that_can_not_start_ends_with_one_clear_line(
    model: Path, taken_port: int, program: str, flags: list[str], line: str
) -> None:
    command = [sys.executable, "-m", program, "--metrics-port", "-1"]
    command += [flag.format(port=taken_port) for flag in flags]
    if program == "data_plane":
        command += ["--control-plane", "127.0.0.1:1", "--model", str(model)]
        command += ["--num-device-blocks", "4"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "GRPC_VERBOSITY": "NONE"}, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{program}: error: {line.format(port=taken_port)}"


def test_logs_that_can_not_be_written_are_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError) as caught, run_planes(tmp_path / "file" / "run", []):
        pass
    assert caught.value.field == "run_folder"
