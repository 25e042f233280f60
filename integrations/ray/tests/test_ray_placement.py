"""The parts of a fleet on Ray, and the processes that its actors run; without Ray."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from control_plane.server.config import ControlPlaneSettings
from data_plane.server.config import DataPlaneSettings
from kvplane.integrations.ray import placement, program
from kvplane.integrations.ray.placement import FleetShape
from kvplane.integrations.ray.program import main
from kvplane.integrations.ray.server_process import ServerProcess
from kvplane.serving.settings import parse
from tests.helpers.waiting import wait_until

WAIT_S = 60.0
ROOT = Path(__file__).parents[3]
# A server in its actor's view: it writes its port file, and runs.
SERVER = "import sys, time; open(sys.argv[1], 'w').write('4711'); time.sleep(90)"


def server(port_file: Path) -> list[str]:
    return [sys.executable, "-S", "-c", SERVER, str(port_file)]


def is_alive(pid: int) -> bool:
    """Return whether it runs; a process that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_every_shard_of_every_pool_is_a_server_with_a_name_of_its_own() -> None:
    shape = FleetShape(pools=3, shards=2, control_planes=2, election="etcd://e:1/n")
    servers = [*placement.control_planes(shape)]
    for pool in placement.pools(shape):
        servers += placement.shards(shape, pool)
        assert len(placement.bundles(shape)) == 2
    assert len({each.name for each in servers}) == len(servers) == 8
    assert [each.port for each in servers[:2]] == [50051, 50052]
    assert all(each.port == 0 for each in servers[2:])


def test_programs_take_what_they_are_started_with() -> None:
    shape = FleetShape(
        pools=2,
        shards=2,
        control_planes=2,
        election="etcd://127.0.0.2:2379/fleet",
        data="--layout layout.json",
    )
    addresses = ["127.0.0.2:50051", "127.0.0.3:50052"]
    *_, shard = placement.shards(shape, "pool-1")
    command = placement.command(shard, "python", "127.0.0.3", "/p", addresses)
    data = parse(DataPlaneSettings, "data_plane", command[3:], {})
    assert (data.pool_id, data.num_shards, data.shard_index) == ("pool-1", 2, 1)
    assert data.control_plane == ",".join(addresses)
    assert data.bind == "127.0.0.3:0"
    *_, last = placement.control_planes(shape)
    command = placement.command(last, "python", "127.0.0.3", "/p", [])
    control = parse(ControlPlaneSettings, "control_plane", command[3:], {})
    assert control.bind == "127.0.0.3:50052"
    assert control.election == shape.election
    assert control.port_file == data.port_file == Path("/p")


def test_bundles_count_what_a_shard_takes() -> None:
    shape = FleetShape(shards=2, cpus=0, gpus=1)
    assert placement.bundles(shape) == [{"GPU": 1}, {"GPU": 1}]


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("--pools", ["--pools", "0"]),
        ("--strategy", ["--strategy", "TIGHT"]),
        ("election", ["--control-planes", "2"]),
        ("cpus", ["--cpus", "0"]),
        ("control_port", ["--control-port", "65535", "--control-planes", "2", "--election", "e"]),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_the_field_at_fault(
    field: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["up", *arguments])
    assert field in capsys.readouterr().err


def command_of_slurm() -> str:
    """Return the command that the script makes, with settings as a job would have them."""
    script = (ROOT / "deploy" / "slurm" / "fleet.sh").read_text()
    lines = re.findall(r"^run\+?=.*$", script, re.MULTILINE)
    settings = "pools=2 shards=2 model=models/recall serving=--insecure"
    made = "\n".join([settings, *lines, 'printf %s "$run"'])
    return subprocess.run(["bash", "-euc", made], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("place", ["the program's help", "the README", "slurm"])
def test_a_fleet_can_be_asked_for_as_shown(place: str) -> None:
    text = {
        "the program's help": lambda: program._USAGE.partition("\n")[2],
        "the README": (ROOT / "integrations" / "ray" / "README.md").read_text,
        "slurm": command_of_slurm,
    }[place]()
    shown = re.search(r"python -m kvplane\.integrations\.ray (up .*)", text.replace("\\\n", ""))
    assert shown is not None
    arguments = shlex.split(shown[1].partition(" | ")[0])
    shape = parse(FleetShape, "ray up", arguments[1:], {})
    assert (shape.pools, shape.shards) == (2, 2)
    assert shape.control == "--insecure"
    assert shape.data == "--model models/recall --insecure"


def test_a_command_that_there_is_not_is_answered_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == main(["start"]) == 2
    assert "up | status | down" in capsys.readouterr().err


def test_an_actor_is_told_when_its_server_has_ended() -> None:
    ended = Event()
    process = ServerProcess(server, ended.set)
    wait_until(lambda: process.port == 4711)
    os.kill(process.pid, signal.SIGKILL)
    assert ended.wait(WAIT_S)
    assert (process.pid, process.port) == (0, 0)


def test_an_actor_is_told_when_its_server_cannot_be_started() -> None:
    def make(port_file: Path) -> list[str]:
        raise TimeoutError("nobody is up")

    ended = Event()
    ServerProcess(make, ended.set)
    assert ended.wait(WAIT_S)


def test_a_server_that_is_of_no_use_is_ended() -> None:
    answers = iter([True, False, True, True])
    ended = Event()
    ServerProcess(server, ended.set, lambda: next(answers, False), check_s=0.0)
    assert ended.wait(WAIT_S)
    assert next(answers, None) is None


def test_a_server_that_is_stopped_ends_and_its_actor_stays() -> None:
    ended = Event()
    process = ServerProcess(server, ended.set)
    wait_until(lambda: process.port)
    pid = process.pid
    process.stop()
    assert not is_alive(pid)
    assert not ended.is_set()


def test_a_server_does_not_outlive_its_actors_process() -> None:
    parent = f"""
import sys, time
from kvplane.integrations.ray.server_process import ServerProcess
process = ServerProcess(lambda port: [sys.executable, "-S", "-c", {SERVER!r}, str(port)], print)
while not process.port:
    time.sleep(0.01)
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    wait_until(lambda: not is_alive(pid))
