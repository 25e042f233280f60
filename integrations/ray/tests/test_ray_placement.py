"""The parts of a fleet on Ray, and the processes that its actors keep running; without Ray."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from control_plane.server.config import ControlPlaneSettings
from data_plane.server.config import DataPlaneSettings
from kvplane.errors import InvalidRequestError
from kvplane.integrations.ray import placement, program
from kvplane.integrations.ray.placement import FleetShape
from kvplane.integrations.ray.program import main
from kvplane.integrations.ray.supervisor import Supervisor
from kvplane.serving.settings import parse

WAIT_S = 60.0
ROOT = Path(__file__).parents[3]
# A server in its supervisor's view: it writes its port file, and runs.
SERVER = "import sys, time; open(sys.argv[1], 'w').write('4711'); time.sleep(90)"


def server(port_file: Path) -> list[str]:
    return [sys.executable, "-S", "-c", SERVER, str(port_file)]


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether it runs; a process that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def supervised() -> Iterator[Supervisor]:
    supervisor = Supervisor(server)
    yield supervisor
    supervisor.stop()


def test_every_shard_of_every_pool_is_a_server_with_a_name_of_its_own() -> None:
    shape = FleetShape(num_pools=3, num_shards=2, num_control_planes=2, election="etcd://e:1/n")
    servers = [*placement.control_planes(shape)]
    for pool in placement.pools(shape):
        servers += placement.shards(shape, pool)
        assert len(placement.bundles(shape)) == 2
    assert len({each.name for each in servers}) == len(servers) == 8
    assert [each.port for each in servers[:2]] == [50051, 50052]
    assert all(each.port == 0 for each in servers[2:])


def test_programs_take_what_they_are_started_with() -> None:
    shape = FleetShape(
        num_pools=2,
        num_shards=2,
        num_control_planes=2,
        election="etcd://127.0.0.2:2379/fleet",
        data_arguments=("--layout", "layout.json"),
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
    shape = FleetShape(num_shards=2, num_cpus=0, num_gpus=1)
    assert placement.bundles(shape) == [{"GPU": 1}, {"GPU": 1}]


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("num_pools", ["--pools", "0"]),
        ("num_shards", ["--shards", "-1"]),
        ("election", ["--control-planes", "2"]),
        ("num_cpus", ["--cpus", "0"]),
        ("control_port", ["--control-port", "65536"]),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_the_field_at_fault(
    field: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *arguments]) == 2
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
        "the program's help": lambda: program._EXAMPLE,
        "the README": (ROOT / "integrations" / "ray" / "README.md").read_text,
        "slurm": command_of_slurm,
    }[place]()
    shown = re.search(r"python -m kvplane\.integrations\.ray (up .*)", text.replace("\\\n", ""))
    assert shown is not None
    arguments = shlex.split(shown[1].partition(" | ")[0])
    shape = program._shape(program._parser().parse_args(arguments))
    assert (shape.num_pools, shape.num_shards) == (2, 2)
    assert shape.control_arguments == ("--insecure",)
    assert shape.data_arguments == ("--model", "models/recall", "--insecure")


def test_strategies_are_rays() -> None:
    with pytest.raises(InvalidRequestError, match="STRICT_PACK"):
        FleetShape(strategy="TIGHT")


def test_a_process_that_ends_is_started_again(supervised: Supervisor) -> None:
    wait_for(lambda: supervised.port == 4711)
    before = supervised.pid
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: supervised.pid not in (0, before) and supervised.port == 4711)
    assert supervised.num_starts == 2


def test_a_process_that_is_of_no_use_is_started_again() -> None:
    answers = iter([True, False, True, True])
    supervisor = Supervisor(server, lambda: next(answers, False), check_s=0.0)
    try:
        wait_for(lambda: supervisor.num_starts == 2 and supervisor.port == 4711)
        assert next(answers, None) is None
    finally:
        supervisor.stop()


def test_a_command_that_cannot_be_made_yet_is_made_later() -> None:
    tries: list[Path] = []

    def make(port_file: Path) -> list[str]:
        tries.append(port_file)
        if len(tries) < 3:
            raise TimeoutError("nobody is up")
        return server(port_file)

    supervisor = Supervisor(make)
    try:
        wait_for(lambda: supervisor.port == 4711)
        assert (len(tries), supervisor.num_starts) == (3, 1)
    finally:
        supervisor.stop()


def test_a_process_ends_when_its_supervisor_is_stopped(supervised: Supervisor) -> None:
    wait_for(lambda: supervised.port)
    pid = supervised.pid
    supervised.stop()
    assert supervised.pid == 0
    assert not is_alive(pid)


def test_a_process_does_not_outlive_its_supervisors_process() -> None:
    parent = f"""
import sys, time
from kvplane.integrations.ray.supervisor import Supervisor
supervisor = Supervisor(lambda port: [sys.executable, "-S", "-c", {SERVER!r}, str(port)])
while not supervisor.port:
    time.sleep(0.01)
print(supervisor.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    wait_for(lambda: not is_alive(pid))
