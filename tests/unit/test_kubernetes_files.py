"""The Kubernetes base agrees with itself, with the programs and with the rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.server.config import ControlPlaneConfig
from data_plane.server.build import layout_from_json
from data_plane.server.config import DataPlaneConfig
from kvplane.serving.settings import parse

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes"
RULES = BASE.parent / "prometheus"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each
    for name in KUSTOMIZATION["resources"]
    for each in yaml.safe_load_all((BASE / name).read_text())
]
PLANES: dict[str, Any] = {"control-plane": ControlPlaneConfig, "data-plane": DataPlaneConfig}
NAME = "app.kubernetes.io/name"


def of_kind(*kinds: str) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] in kinds}


WORKLOADS = of_kind("Deployment", "StatefulSet")


def container(plane: str) -> dict[str, Any]:
    (only,) = WORKLOADS[plane]["template"]["spec"]["containers"]
    return only


def ports(plane: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(plane)["ports"]}


def test_every_file_is_listed_and_every_object_has_a_kind_and_a_name() -> None:
    files = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS]
    assert all(each["apiVersion"] for each in OBJECTS)
    assert len(names) == len(set(names))
    assert set(WORKLOADS) == set(PLANES)


@pytest.mark.parametrize("plane", PLANES)
def test_a_plane_takes_its_arguments_and_listens_where_the_ports_say(plane: str) -> None:
    arguments = [each.replace("$(POD_IP)", "10.0.0.7") for each in container(plane)["args"]]
    config = parse(PLANES[plane], plane.replace("-", "_"), arguments, {})
    found = {"grpc": int(config.bind.rpartition(":")[2]), "metrics": config.metrics_port}
    if isinstance(config, ControlPlaneConfig):
        found["page"] = config.page_port
    assert ports(plane) == found
    image = container(plane)["image"]
    assert image in {each["name"] for each in KUSTOMIZATION["images"]}


@pytest.mark.parametrize("plane", PLANES)
def test_probes_limits_and_rights(plane: str) -> None:
    only, pod = container(plane), WORKLOADS[plane]["template"]["spec"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        ((kind, how),) = ((k, v) for k, v in only[probe].items() if k in ("httpGet", "tcpSocket"))
        assert how["port"] in ports(plane)
        assert how.get("path", "/healthz") == "/healthz", kind
    assert only["resources"]["limits"]["memory"]
    assert set(only["resources"]["requests"]) == {"cpu", "memory"}
    assert pod["securityContext"]["runAsNonRoot"]
    assert only["securityContext"]["readOnlyRootFilesystem"]
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    assert {mount["name"] for mount in only.get("volumeMounts", [])} == volumes


@pytest.mark.parametrize("plane", PLANES)
def test_selectors_find_the_pods_and_ports_that_they_mean(plane: str) -> None:
    labels = WORKLOADS[plane]["template"]["metadata"]["labels"]
    assert WORKLOADS[plane]["selector"]["matchLabels"].items() <= labels.items()
    service = of_kind("Service")[plane]
    assert service["selector"].items() <= labels.items()
    assert all(port["targetPort"] in ports(plane) for port in service["ports"])
    policy = of_kind("NetworkPolicy")[plane]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    open_ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert open_ports == {"grpc", "metrics"}
    assert all(rule["from"] for rule in policy["ingress"])


def test_a_data_plane_may_reach_the_control_plane_by_the_name_that_it_is_given() -> None:
    config = parse(
        DataPlaneConfig,
        "data_plane",
        [each.replace("$(POD_IP)", "10.0.0.7") for each in container("data-plane")["args"]],
        {},
    )
    host, _, port = config.control_plane.rpartition(":")
    assert int(port) in {each["port"] for each in of_kind("Service")[host]["ports"]}
    callers = of_kind("NetworkPolicy")[host]["ingress"][0]["from"]
    pods = [each["podSelector"]["matchLabels"] for each in callers]
    assert {NAME: "data-plane"} in pods


def test_what_is_scraped_has_the_jobs_that_the_rules_name() -> None:
    monitor = of_kind("PodMonitor")["kvplane"]
    jobs = {
        spec["template"]["metadata"]["labels"][monitor["jobLabel"]] for spec in WORKLOADS.values()
    }
    named = set(re.findall(r"job_name: (kvplane_\w+)", (RULES / "prometheus.yml").read_text()))
    assert jobs == named
    (expression,) = monitor["selector"]["matchExpressions"]
    assert set(expression["values"]) == set(PLANES)
    assert all(end["port"] in ports(p) for end in monitor["podMetricsEndpoints"] for p in PLANES)


def test_the_layout_of_the_base_is_one() -> None:
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    assert generated["files"] == ["layout.json"]
    assert layout_from_json(BASE / "layout.json").model_id.startswith("recall-")
