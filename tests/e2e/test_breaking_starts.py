"""Programs that can not start say why in a line, and leave nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplane.errors import InvalidRequestError
from scripts.planes import run_planes
from tests.helpers.programs import run


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
        (
            ["--bind", "127.0.0.1:0", "--port-file", "/proc/no/port"],
            "cannot write port_file /proc/no/port: No such file or directory",
        ),
    ],
)
def test_a_plane_that_can_not_start_ends_with_one_clear_line(
    model: Path, taken_port: int, program: str, flags: list[str], line: str
) -> None:
    arguments = ["--metrics-port", "-1", *(flag.format(port=taken_port) for flag in flags)]
    if program == "data_plane":
        arguments += ["--control-plane", "127.0.0.1:1", "--model", str(model)]
        arguments += ["--num-device-blocks", "4"]
    done = run(program, *arguments, env={"GRPC_VERBOSITY": "NONE"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{program}: error: {line.format(port=taken_port)}"


def test_logs_that_can_not_be_written_are_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError) as caught, run_planes(tmp_path / "file" / "run", []):
        pass
    assert caught.value.field == "run_folder"
