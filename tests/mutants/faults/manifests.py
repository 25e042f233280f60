"""Faults of the Kubernetes files."""

from __future__ import annotations

from tests.mutants.fault import Fault

BASE, NODE, SHARDED, ELECTED = (
    f"deploy/kubernetes/{folder}"
    for folder in (
        *("base", "components/node-local"),
        *("components/sharded-pool", "components/elected-control-plane"),
    )
)
TESTS = "tests/unit/test_kubernetes_files.py"
ELECTION = f"{TESTS}::test_each_of_two_control_planes_may_do_what_the_election_calls"
POOLS = f"{TESTS}::test_a_group_of_a_leader_worker_set_is_a_pool"
SELECTORS = f"{TESTS}::test_selectors_find_the_pods_and_ports_that_they_mean"

FAULTS = tuple(
    Fault(*row)
    for row in (
        (
            "another_lease_may_be_written",
            f"{ELECTED}/rights.yaml",
            "resourceNames: [control-plane]",
            "resourceNames: [leader]",
            ELECTION,
        ),
        (
            "a_lease_may_not_be_replaced",
            f"{ELECTED}/rights.yaml",
            "verbs: [get, update]",
            "verbs: [get]",
            ELECTION,
        ),
        (
            "the_token_is_not_mounted",
            f"{ELECTED}/control-plane.yaml",
            "automountServiceAccountToken, value: true",
            "automountServiceAccountToken, value: false",
            ELECTION,
        ),
        (
            "the_service_hides_who_stands_by",
            f"{ELECTED}/kustomization.yaml",
            "path: /spec/clusterIP, value: None",
            'path: /spec/clusterIP, value: ""',
            ELECTION,
        ),
        (
            "who_stands_by_is_restarted",
            f"{ELECTED}/control-plane.yaml",
            "value: {tcpSocket: {port: grpc}, periodSeconds: 10,",
            "value: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 10,",
            ELECTION,
        ),
        (
            "all_groups_are_one_pool",
            f"{SHARDED}/data-plane.yaml",
            "--pool-id=pool-$(GROUP)",
            "--pool-id=pool",
            POOLS,
        ),
        (
            "every_shard_is_the_first",
            f"{SHARDED}/data-plane.yaml",
            "--shard-index=$(LWS_WORKER_INDEX)",
            "--shard-index=0",
            POOLS,
        ),
        (
            "a_shard_is_limited_otherwise",
            f"{SHARDED}/data-plane.yaml",
            "limits: {memory: 8Gi}",
            "limits: {memory: 9Gi}",
            POOLS,
        ),
        (
            "a_budget_is_of_nobody",
            f"{SHARDED}/disruption-budget.yaml",
            "app.kubernetes.io/name: data-plane",
            "app.kubernetes.io/name: data",
            f"{SELECTORS}[fleet]",
        ),
        (
            "a_policy_opens_no_port_for_metrics",
            f"{NODE}/network-policy.yaml",
            "[{port: metrics}, {port: data-metrics}]",
            "[{port: metrics}]",
            f"{SELECTORS}[node]",
        ),
        (
            "a_setting_is_not_known",
            f"{BASE}/data-plane.yaml",
            "--num-device-blocks=1024",
            "--num-blocks=1024",
            f"{TESTS}::test_a_plane_takes_its_arguments_and_listens_where_the_ports_say"
            "[base-data-plane]",
        ),
        (
            "planes_of_a_pod_do_not_meet",
            f"{NODE}/planes.yaml",
            "--control-plane=127.0.0.1:50051",
            "--control-plane=127.0.0.1:50061",
            f"{TESTS}::test_planes_of_one_pod_meet_on_its_loopback",
        ),
    )
)
