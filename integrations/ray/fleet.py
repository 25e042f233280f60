"""Starts, shows and ends a fleet on the Ray cluster that this process is connected to."""

from __future__ import annotations

import time
from typing import Any, Final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from . import placement
from .placement import FleetShape, Server
from .server_actor import NAMESPACE, ServerActor, Status, addresses_of, statuses

_GROUP: Final = "kvplane-"
_CONTROL_CPUS: Final = 1.0
_STOP_S: Final = 15.0
_POLL_S: Final = 0.1
_HEAD: Final = "node:__internal_head__"


def connect(address: str = "auto") -> None:
    """Join the cluster that a Ray process on this machine is part of. Raises ConnectionError."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")


def disconnect() -> None:
    """Leave the cluster; the servers continue."""
    ray.shutdown()


def up(shape: FleetShape) -> list[str]:
    """Start missing servers; return the control planes' addresses, once all servers are up.

    Raises TimeoutError when the cluster has no room, or servers do not come up.
    """
    end_s = time.monotonic() + shape.timeout_s
    control = placement.control_planes(shape)
    names = [each.name for each in control]
    nodes = _nodes()
    for i, server in enumerate(control):
        # Clients look for it where it was, as long as that node lives.
        strategy = NodeAffinitySchedulingStrategy(nodes[i % len(nodes)], soft=True)
        _start(server, [], num_cpus=_CONTROL_CPUS, scheduling_strategy=strategy)
    for pool in placement.pools(shape):
        group = _group(pool, shape)
        if not group.wait(max(1, int(end_s - time.monotonic()))):
            raise TimeoutError(f"the cluster has no room for {pool}: {group.bundle_specs}")
        for server in placement.shards(shape, pool):
            _start(
                server,
                names,
                num_cpus=shape.cpus,
                num_gpus=shape.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, server.bundle),
            )
    wanted = names + [
        server.name for pool in placement.pools(shape) for server in placement.shards(shape, pool)
    ]
    while missing := set(wanted) - {each.name for each in statuses(wanted) if each.address}:
        if time.monotonic() >= end_s:
            raise TimeoutError(f"not up: {', '.join(sorted(missing))}")
        time.sleep(_POLL_S)
    return addresses_of(names, 1.0)


def status() -> list[Status]:
    """Return the status of all servers that answer, by name."""
    return sorted(statuses(_names()))


def down() -> int:
    """End all servers; return how many there were."""
    names = _names()
    actors = [ray.get_actor(name, NAMESPACE) for name in names]
    # Data planes first: they need not find out that the control plane has gone.
    for is_control in (False, True):
        stopping = [
            actor.stop.remote()
            for name, actor in zip(names, actors, strict=True)
            if name.startswith(placement.CONTROL) == is_control
        ]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
    for actor in actors:
        ray.kill(actor)
    for group in placement_group_table().values():
        if group["name"].startswith(_GROUP) and group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(group["name"]))
    return len(names)


def _nodes() -> list[str]:
    """Return the ids of live nodes, the cluster's head first: without it nothing is restarted."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: _HEAD not in node["Resources"])
    return [node["NodeID"] for node in nodes]


def _names() -> list[str]:
    return [str(name) for name in ray.util.list_named_actors()]


def _start(server: Server, control: list[str], **options: Any) -> None:
    """Start a server unless it exists; it outlives this process and restarts where it fits."""
    ray.remote(ServerActor).options(
        name=server.name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=2,  # so that it answers status calls while it stops
        **options,
    ).remote(server, control)


def _group(pool: str, shape: FleetShape) -> PlacementGroup:
    name = f"{_GROUP}{pool}"
    try:
        return get_placement_group(name)
    except ValueError:
        return placement_group(
            placement.bundles(shape), strategy=shape.strategy, name=name, lifetime="detached"
        )
