"""The servers of a fleet, with their names and start commands. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvplane.errors import InvalidRequestError

STRATEGIES: Final = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
CONTROL: Final = "control"


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The fleet to start. ``strategy``: Ray's placement strategy for a pool's shards. ``num_cpus``,
    ``num_gpus``: of each shard, as Ray counts them. ``control_port``: of the first control plane,
    the next has the next; fixed, so that one that restarts on its machine keeps its address.
    ``control_arguments``, ``data_arguments``: more for each program.

    Raises InvalidRequestError naming the field at fault.
    """

    num_pools: int = 1
    num_shards: int = 1
    num_control_planes: int = 1
    strategy: str = "STRICT_PACK"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    control_port: int = 50051
    election: str = ""
    control_arguments: tuple[str, ...] = ()
    data_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_pools", "num_shards", "num_control_planes"):
            if getattr(self, field) < 1:
                raise InvalidRequestError("must be at least 1", field=field)
        if self.num_cpus <= 0 and self.num_gpus <= 0:
            raise InvalidRequestError("must be above 0 where num_gpus is 0", field="num_cpus")
        if self.strategy not in STRATEGIES:
            raise InvalidRequestError(f"must be one of {', '.join(STRATEGIES)}", field="strategy")
        if self.num_control_planes > 1 and not self.election:
            raise InvalidRequestError(
                "is needed by several control planes: etcd://HOST:PORT,…/NAME", field="election"
            )
        if not 0 < self.control_port <= 65_535 - self.num_control_planes:
            raise InvalidRequestError("must be a port's number", field="control_port")


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
            (*election, *shape.control_arguments),
            port=shape.control_port + i,
        )
        for i in range(shape.num_control_planes)
    ]


def pools(shape: FleetShape) -> list[str]:
    """Return the ids of the pools, which also name their placement groups."""
    return [f"pool-{i}" for i in range(shape.num_pools)]


def shards(shape: FleetShape, pool: str) -> list[Server]:
    """Return a pool's data planes, one a bundle."""
    return [
        Server(
            f"{pool}-shard-{i}",
            "data_plane",
            (
                *("--pool-id", pool, "--num-shards", str(shape.num_shards)),
                *("--shard-index", str(i), *shape.data_arguments),
            ),
            pool=pool,
            bundle=i,
        )
        for i in range(shape.num_shards)
    ]


def bundles(shape: FleetShape) -> list[dict[str, float]]:
    """Return a placement group's bundles: the resources of each shard, as Ray counts them."""
    needs = {"CPU": shape.num_cpus, "GPU": shape.num_gpus}
    return [{name: num for name, num in needs.items() if num > 0}] * shape.num_shards


def command(
    server: Server, python: str, host: str, port_file: str, control: Sequence[str]
) -> list[str]:
    """Return its start command on ``host``. ``control``: the control planes, for a data plane."""
    arguments = [python, "-m", server.program, "--bind", f"{host}:{server.port}"]
    arguments += ["--port-file", port_file, "--metrics-port", "0"]
    if server.program == "data_plane":
        arguments += ["--control-plane", ",".join(control)]
    return [*arguments, *server.arguments]
