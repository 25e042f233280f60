"""The servers of a fleet, with their names and start commands. Knows nothing of Ray."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.serving.settings import setting

CONTROL: Final = "control"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Show or end the servers of a Ray cluster."""

    address: str = setting("auto", help="Address of the cluster, as ray.init takes it.")


@dataclass(frozen=True, kw_only=True)
class FleetShape(Cluster):
    """Start missing servers on a Ray cluster, and wait until all are up."""

    pools: int = setting(1, help="Pools.", minimum=1)
    shards: int = setting(1, help="Data planes of each pool.", minimum=1)
    control_planes: int = setting(1, help="Control planes.", minimum=1)
    election: str = setting(
        "", help="How several control planes elect the one that serves: etcd://HOST:PORT,…/NAME."
    )
    control_port: int = setting(
        50051,
        help="Port of the first control plane; the next has the next. Fixed, so that one that"
        " restarts on its machine keeps its address.",
        minimum=1,
        maximum=65_535,
    )
    strategy: str = setting(
        "STRICT_PACK",
        help="Ray's placement strategy for a pool's shards; the default is one machine.",
        choices=("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"),
    )
    cpus: float = setting(1.0, help="CPUs of each shard, as Ray counts them.", minimum=0)
    gpus: float = setting(0.0, help="GPUs of each shard, as Ray counts them.", minimum=0)
    control: str = setting("", help="More arguments of each control plane, as in a shell.")
    data: str = setting("", help="More arguments of each data plane, as in a shell.")
    timeout_s: float = setting(120.0, help="How long to wait.", unit="s", minimum=1)

    def __post_init__(self) -> None:
        if not self.cpus and not self.gpus:
            raise InvalidRequestError("must be above 0 where gpus is 0", field="cpus")
        if self.control_planes > 1 and not self.election:
            raise InvalidRequestError("must be given for several control planes", field="election")
        if self.control_port + self.control_planes > 65_536:
            raise InvalidRequestError("leaves no ports for all of them", field="control_port")


@dataclass(frozen=True, slots=True)
class Server:
    """A server: its actor's name, its program, and its arguments without the addresses, which are
    known where it runs. ``pool``: whose placement group it is in, empty for a control plane;
    ``bundle``: index in the group. ``port``: 0 for any.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    port: int = 0
    pool: str = ""
    bundle: int = 0


def control_planes(shape: FleetShape) -> list[Server]:
    """Return the control planes in the order of their ports."""
    election = ("--election", shape.election) if shape.election else ()
    return [
        Server(
            f"{CONTROL}-{i}",
            "control_plane",
            (*election, *shlex.split(shape.control)),
            port=shape.control_port + i,
        )
        for i in range(shape.control_planes)
    ]


def pools(shape: FleetShape) -> list[str]:
    """Return the ids of the pools, which also name their placement groups."""
    return [f"pool-{i}" for i in range(shape.pools)]


def shards(shape: FleetShape, pool: str) -> list[Server]:
    """Return a pool's data planes, one a bundle."""
    return [
        Server(
            f"{pool}-shard-{i}",
            "data_plane",
            (
                *("--pool-id", pool, "--num-shards", str(shape.shards)),
                *("--shard-index", str(i), *shlex.split(shape.data)),
            ),
            pool=pool,
            bundle=i,
        )
        for i in range(shape.shards)
    ]


def bundles(shape: FleetShape) -> list[dict[str, float]]:
    """Return a placement group's bundles: the resources of each shard, as Ray counts them."""
    needs = {"CPU": shape.cpus, "GPU": shape.gpus}
    return [{name: num for name, num in needs.items() if num > 0}] * shape.shards


def command(
    server: Server, python: str, host: str, port_file: str, control: Sequence[str]
) -> list[str]:
    """Return its start command on ``host``. ``control``: the control planes, for a data plane."""
    arguments = [python, "-m", server.program, "--bind", f"{host}:{server.port}"]
    arguments += ["--port-file", port_file, "--metrics-port", "0"]
    if server.program == "data_plane":
        arguments += ["--control-plane", ",".join(control)]
    return [*arguments, *server.arguments]
