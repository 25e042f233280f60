"""Faults of the Kubernetes files, each of which their tests must notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.helpers.patched_faults import load

TESTS = load("unit/test_kubernetes_files.py")


class Fault(NamedTuple):
    """``new`` takes the place of ``old`` in a variant's objects, as JSON."""

    variant: str
    old: str
    new: str
    test: Callable[..., None]
    arguments: tuple[str, ...] = ()


ELECTION = TESTS.test_each_of_two_control_planes_may_do_what_the_election_calls
POOLS = TESTS.test_a_group_of_a_leader_worker_set_is_a_pool
SELECTORS = TESTS.test_selectors_find_the_pods_and_ports_that_they_mean
ARGUMENTS = TESTS.test_a_plane_takes_its_arguments_and_listens_where_the_ports_say
FAULTS = {
    "another_lease_may_be_written": Fault(
        "fleet", '"resourceNames": ["control-plane"]', '"resourceNames": ["leader"]', ELECTION
    ),
    "a_lease_may_not_be_replaced": Fault("fleet", '["get", "update"]', '["get"]', ELECTION),
    "the_token_is_not_mounted": Fault(
        "fleet", '"automountServiceAccountToken": true', '"automountServiceAccountToken": false',
        ELECTION,
    ),
    "the_service_hides_who_stands_by": Fault(
        "fleet", '"clusterIP": "None"', '"clusterIP": ""', ELECTION
    ),
    "who_stands_by_is_restarted": Fault(
        "fleet",
        '"livenessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 10',
        '"livenessProbe": {"httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 10',
        ELECTION,
    ),
    "all_groups_are_one_pool": Fault("fleet", "pool-$(GROUP)", "pool", POOLS),
    "every_shard_is_the_first": Fault(
        "fleet", "--shard-index=$(LWS_WORKER_INDEX)", "--shard-index=0", POOLS
    ),
    "a_shard_is_limited_otherwise": Fault("fleet", '"memory": "8Gi"', '"memory": "9Gi"', POOLS),
    "a_budget_is_of_nobody": Fault(
        "fleet",
        '"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": "data-plane"',
        '"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": "data"',
        SELECTORS, ("fleet",),
    ),
    "a_policy_opens_no_port_for_metrics": Fault(
        "node", '[{"port": "metrics"}, {"port": "data-metrics"}]', '[{"port": "metrics"}]',
        SELECTORS, ("node",),
    ),
    "a_setting_is_not_known": Fault(
        "base", "--num-device-blocks", "--num-blocks", ARGUMENTS, ("base", "data-plane")
    ),
    "planes_of_a_pod_do_not_meet": Fault(
        "node", "--control-plane=127.0.0.1:50051", "--control-plane=127.0.0.1:50061",
        TESTS.test_planes_of_one_pod_meet_on_its_loopback,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kubernetes_files_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, old, new, test, arguments = FAULTS[fault]
    text = json.dumps(TESTS.VARIANTS[variant])
    assert old in text
    test(*arguments)
    monkeypatch.setitem(TESTS.VARIANTS, variant, json.loads(text.replace(old, new)))
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        test(*arguments)
