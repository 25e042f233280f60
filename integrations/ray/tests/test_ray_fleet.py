"""A fleet on Ray, parts of which are lost while an engine answers: its answers stay the same."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ray_cluster import POOL, UP_S

from tests.helpers.waiting import wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # Ray's
]


def status_of(name: str) -> Any:
    from kvplane.integrations.ray import fleet

    return next((each for each in fleet.status() if each.name == name), None)


def wait_until_it_is_another(name: str, before: Any) -> Any:
    """Wait until the server is up again, as another process."""

    def is_another() -> bool:
        now = status_of(name)
        return now is not None and now.address and now.pid != before.pid

    wait_until(is_another, UP_S, lambda: status_of(name))
    return status_of(name)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_pool_is_on_one_node_and_the_servers_are_processes(addresses) -> None:
    from kvplane.integrations.ray import fleet

    found = {each.name: each for each in fleet.status()}
    assert len(found) == 5
    for pool in ("pool-0", "pool-1"):
        assert found[f"{pool}-shard-0"].node == found[f"{pool}-shard-1"].node
    assert addresses == found["control-0"].address
    assert all(each.pid != each.actor_pid for each in found.values())


@pytest.mark.parametrize("killed", ["pid", "actor_pid"])
def test_a_shard_that_is_killed_is_started_again_with_its_actor(same_answers_after, killed) -> None:
    before = status_of(f"{POOL}-shard-1")
    engine = same_answers_after(lambda: os.kill(getattr(before, killed), signal.SIGKILL))
    assert engine.stats.num_reopened_sessions >= 1
    after = wait_until_it_is_another(f"{POOL}-shard-1", before)
    assert after.actor_pid != before.actor_pid
    wait_until(lambda: not is_alive(before.pid), UP_S)


def test_a_control_plane_whose_actor_is_killed_is_where_it_was(same_answers_after) -> None:
    before = status_of("control-0")
    engine = same_answers_after(lambda: os.kill(before.actor_pid, signal.SIGKILL))
    assert engine.stats.num_reopened_sessions >= 1
    after = wait_until_it_is_another("control-0", before)
    if after.node == before.node:
        assert after.address == before.address


def test_a_pool_whose_node_is_lost_comes_up_on_another(cluster, same_answers_after) -> None:
    before = status_of(f"{POOL}-shard-0")
    assert before.node != cluster.head
    try:
        engine = same_answers_after(lambda: cluster.lose_node(before.node))
        assert engine.stats.num_reopened_sessions >= 1
        assert status_of(f"{POOL}-shard-0").node != before.node
    finally:
        cluster.add_node(before.node)


def test_nothing_is_noticed_of_a_restart_of_rays_own_store(cluster, same_answers_after) -> None:
    from kvplane.integrations.ray import fleet

    before = fleet.status()
    engine = same_answers_after(cluster.restart_store)
    assert engine.stats.num_reopened_sessions == 0
    assert fleet.status() == before


def test_down_leaves_nothing(addresses) -> None:
    from ray.util import list_named_actors, placement_group_table

    from kvplane.integrations.ray import fleet

    pids = [each.pid for each in fleet.status()]
    assert fleet.down() == 5
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), UP_S)
    assert list_named_actors() == []
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    assert fleet.status() == []
