"""The Kubernetes files agree with each other, with the programs and with the rules."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.election.kubernetes_elector import KubernetesElector
from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import layout_from_json
from engine.serving.config import ServeSettings
from kvplane.integrations.router.config import RouterSettings
from kvplane.models.hf import layout_from_hf
from kvplane.serving.settings import parse
from tests.helpers.kustomized import Object, objects

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
RULES = FOLDER.parent / "prometheus"
MONITORS = FOLDER / "components" / "pod-monitors"
VARIANTS = {name: objects(FOLDER / name) for name in ("base", "fleet", "node", "serving")}
PLANES: dict[str, Any] = {"control-plane": ControlPlaneSettings, "data-plane": DataPlaneSettings}
PROGRAMS = {**PLANES, "engine": ServeSettings, "router": RouterSettings}
RUN = {
    "engine": ["python", "-m", "kvplane.engine", "serve"],
    "router": ["python", "-m", "kvplane.integrations.router"],
}
PROGRAMS_OF = [(v, p) for v in VARIANTS for p in PROGRAMS if v == "serving" or p in PLANES]
NAME = "app.kubernetes.io/name"
# What Kubernetes and the LeaderWorkerSet's controller put into a pod.
GIVEN = {
    "POD_IP": "10.0.0.7",
    "POD_NAMESPACE": "kvplane",
    "GROUP": "1",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}
CONTROLLERS_OWN = {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}


def of_kind(variant: str, *kinds: str) -> dict[str, Any]:
    found = [each for each in VARIANTS[variant] if each["kind"] in kinds]
    return {each["metadata"]["name"]: each.get("spec", each) for each in found}


def pods(variant: str) -> dict[str, Object]:
    """The pod template of each workload."""
    templates = {
        name: spec["template"]
        for name, spec in of_kind(variant, "Deployment", "StatefulSet").items()
    }
    for name, spec in of_kind(variant, "LeaderWorkerSet").items():
        templates[name] = spec["leaderWorkerTemplate"]["workerTemplate"]
    return templates


def containers(variant: str) -> dict[str, tuple[Object, Object]]:
    """By the plane that each runs, with its pod's template."""
    return {
        container["name"]: (container, pod)
        for pod in pods(variant).values()
        for container in pod["spec"]["containers"]
    }


def config_of(variant: str, plane: str) -> Any:
    """The settings that its arguments make, in a pod whose mounted files are all there."""
    container, _ = containers(variant)[plane]
    named = {each["name"] for each in container.get("env", ())} | CONTROLLERS_OWN
    arguments = [
        re.sub(r"\$\((\w+)\)", lambda m: GIVEN[m[1]] if m[1] in named else m[0], each)
        for each in container["args"]
    ]
    mounted = [re.sub("=/(models|tls|access).*", f"={FOLDER}", each) for each in arguments]
    return parse(PROGRAMS[plane], plane.replace("-", "_"), mounted, {})


def ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def selected(variant: str, selector: dict[str, str]) -> list[Object]:
    return [
        pod
        for pod in pods(variant).values()
        if selector.items() <= pod["metadata"]["labels"].items()
    ]


@pytest.mark.parametrize("folder", [p.parent for p in FOLDER.rglob("kustomization.yaml")], ids=str)
def test_every_file_is_used(folder: Path) -> None:
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    patches = {each["path"] for each in spec.get("patches", []) if "path" in each}
    named = {*spec.get("resources", []), *spec.get("configurations", []), *patches}
    assert {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"} <= named
    assert all((folder / name).exists() for name in named)


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_have_kinds_and_names_and_each_plane_runs_once(variant: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in VARIANTS[variant]]
    assert all(each["apiVersion"] for each in VARIANTS[variant])
    assert len(names) == len(set(names))
    assert set(containers(variant)) == set(PROGRAMS if variant == "serving" else PLANES)


@pytest.mark.parametrize(("variant", "plane"), PROGRAMS_OF)
def test_a_plane_takes_its_arguments_and_listens_where_the_ports_say(
    variant: str, plane: str
) -> None:
    container, _ = containers(variant)[plane]
    config = config_of(variant, plane)
    expected = {config.metrics_port}
    if not config.bind.startswith("127."):
        expected.add(int(config.bind.rpartition(":")[2]))
    if getattr(config, "page_port", -1) >= 0:
        expected.add(config.page_port)
    assert set(ports(container).values()) == expected
    image = plane if plane in PLANES else "engine"
    assert re.fullmatch(rf"kvplane/{image}:\d+\.\d+\.\d+", container["image"])
    assert container.get("command") == RUN.get(plane)


@pytest.mark.parametrize(("variant", "plane"), PROGRAMS_OF)
def test_probes_limits_and_rights(variant: str, plane: str) -> None:
    only, pod = containers(variant)[plane]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        ((kind, how),) = ((k, v) for k, v in only[probe].items() if k in ("httpGet", "tcpSocket"))
        assert how["port"] in ports(only)
        stands_by = (variant, plane) == ("fleet", "control-plane")
        ready = "/healthz" if stands_by else "/ready" if plane in PLANES else "/health"
        path = ready if probe == "readinessProbe" else "/healthz"
        assert how.get("path", path) == path, kind
        is_served_by_tls = variant == "serving" and plane in PLANES and kind == "httpGet"
        assert how.get("scheme") == ("HTTPS" if is_served_by_tls else None)
    assert "httpGet" in only["livenessProbe"], "a hung event loop still accepts connections"
    assert only["resources"]["limits"]["memory"]
    assert set(only["resources"]["requests"]) == {"cpu", "memory"}
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert not pod["spec"]["enableServiceLinks"]
    assert only["securityContext"]["readOnlyRootFilesystem"]
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    assert {mount["name"] for mount in only.get("volumeMounts", [])} <= set(volumes)
    maps = {each["configMap"]["name"] for each in volumes.values() if "configMap" in each}
    assert maps <= set(of_kind(variant, "ConfigMap"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_find_the_pods_and_ports_that_they_mean(variant: str) -> None:
    for spec in of_kind(variant, "Deployment", "StatefulSet").values():
        assert selected(variant, spec["selector"]["matchLabels"]) == [spec["template"]]
    for service in of_kind(variant, "Service").values():
        (pod,) = selected(variant, service["selector"])
        found = {name for each in pod["spec"]["containers"] for name in ports(each)}
        assert {port["targetPort"] for port in service["ports"]} <= found
    for policy in of_kind(variant, "NetworkPolicy").values():
        (pod,) = selected(variant, policy["podSelector"]["matchLabels"])
        found = {name for each in pod["spec"]["containers"] for name in ports(each)}
        opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert opened == found - {"page"}
        assert all(rule["from"] for rule in policy["ingress"])
    budgets = of_kind(variant, "PodDisruptionBudget")
    assert len(budgets) == len(pods(variant)), "every workload has one"
    for budget in budgets.values():
        assert selected(variant, budget["selector"]["matchLabels"])
        assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize("variant", ["base", "fleet"])
def test_a_data_plane_may_reach_the_control_plane_by_the_name_that_it_is_given(
    variant: str,
) -> None:
    target = config_of(variant, "data-plane").control_plane
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    assert int(port) in {each["port"] for each in of_kind(variant, "Service")[host]["ports"]}
    callers = of_kind(variant, "NetworkPolicy")[host]["ingress"][0]["from"]
    assert {NAME: "data-plane"} in [each["podSelector"]["matchLabels"] for each in callers]


def test_planes_of_one_pod_meet_on_its_loopback() -> None:
    control, data = (config_of("node", plane) for plane in PLANES)
    assert data.control_plane == control.bind == "127.0.0.1:50051"
    assert data.bind.startswith("127.0.0.1:")
    assert len(pods("node")) == 1


def test_each_of_two_control_planes_may_do_what_the_election_calls() -> None:
    container, pod = containers("fleet")["control-plane"]
    config = config_of("fleet", "control-plane")
    assert of_kind("fleet", "Deployment")["control-plane"]["replicas"] == 2
    assert of_kind("fleet", "Service")["control-plane"]["clusterIP"] == "None"  # all addresses
    assert config.advertise == "10.0.0.7:50051"
    namespace, _, lease = config.election.removeprefix("kubernetes://").partition("/")
    assert namespace == GIVEN["POD_NAMESPACE"]
    assert pod["spec"]["automountServiceAccountToken"]
    account = pod["spec"]["serviceAccountName"]
    (binding,) = of_kind("fleet", "RoleBinding").values()
    assert [each["name"] for each in binding["subjects"]] == [account]
    rules = of_kind("fleet", "Role")[binding["roleRef"]["name"]]["rules"]
    granted = {
        (verb, tuple(rule.get("resourceNames", ()))) for rule in rules for verb in rule["verbs"]
    }
    assert granted == {("create", ()), ("get", (lease,)), ("update", (lease,))}
    elector = KubernetesElector(None, namespace, lease, "")  # type: ignore[arg-type]
    assert elector._folder.split("/")[2] == rules[0]["apiGroups"][0]
    assert elector._folder.split("/")[-1] == rules[0]["resources"][0]
    # Who stands by does not serve: probes of that would restart it, and bar it from a drain.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "DoNotSchedule", "one node would take both"
    callers = of_kind("fleet", "NetworkPolicy")["control-plane"]["ingress"][0]["from"]
    assert {NAME: "control-plane"} in [each["podSelector"]["matchLabels"] for each in callers]


def test_a_group_of_a_leader_worker_set_is_a_pool() -> None:
    spec = of_kind("fleet", "LeaderWorkerSet")["data-plane"]
    config = config_of("fleet", "data-plane")
    assert (config.pool_id, config.shard_index) == ("pool-1", 1)
    assert config.num_shards == spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert "data-plane" not in of_kind("fleet", "Service", "StatefulSet")  # the controller's name
    base, _ = containers("base")["data-plane"]
    shard, _ = containers("fleet")["data-plane"]
    assert set(base["args"]) <= set(shard["args"])
    assert all(base[key] == shard[key] for key in base.keys() - {"args", "env"})


@pytest.mark.parametrize("variant", ["base", "serving"])
def test_blocks_outlive_a_pod_on_a_volume_of_its_own(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = FOLDER / "components" / "file-tier"
    overlay = {"resources": [str(FOLDER / variant)], "components": [str(component)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    monkeypatch.setitem(VARIANTS, "files", objects(tmp_path))
    (claim,) = of_kind("files", "StatefulSet")["data-plane"]["volumeClaimTemplates"]
    container, pod = containers("files")["data-plane"]
    config = config_of("files", "data-plane")
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts[str(config.file_tier_dir)] == claim["metadata"]["name"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert 0 < config.file_tier_bytes < int(size.removesuffix("Gi")) << 30
    rights = pod["spec"]["securityContext"]
    assert rights["fsGroup"] == rights["runAsUser"], "a new volume is root's"


def test_no_variant_needs_an_operator_of_prometheus() -> None:
    for variant in VARIANTS:
        assert not of_kind(variant, "PodMonitor", "ServiceMonitor", "PrometheusRule")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_namespace_refuses_pods_with_rights(variant: str) -> None:
    (namespace,) = of_kind(variant, "Namespace").values()
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_callers_show_certificates_that_the_access_list_knows() -> None:
    made = of_kind("serving", "ConfigMap")["access"]["data"]["access.toml"]
    callers = {each["certificate"]: each for each in tomllib.loads(made)["callers"]}
    for plane in PROGRAMS:
        container, pod = containers("serving")[plane]
        assert ("--insecure" in container["args"]) == (plane not in PLANES), (
            "users reach the router"
        )
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        secret = volumes["tls"]["secret"]["secretName"].removesuffix("-tls")
        assert secret == (plane if plane in PLANES else "engine")
        config = config_of("serving", plane)
        if plane in PLANES:
            assert config.tls_client_ca and config.access_file and config.metrics_tls
        if plane != "control-plane":
            assert config.tls and config.tls_ca
            assert (config.tls_name, secret in callers) == ("kvplane", True)
    assert callers["engine"]["roles"] == ["engine", "router"]
    assert callers["data-plane"]["roles"] == ["plane"]


def test_rules_and_boards_are_the_files_that_compose_uses() -> None:
    maps = of_kind("serving", "ConfigMap")
    assert {*maps["kvplane-rules"]["data"]} == {"rules.yml", "alerts.yml"}
    boards = (RULES.parent / "grafana" / "boards").glob("*.json")
    assert {*maps["kvplane-boards"]["data"]} == {path.name for path in boards}
    assert maps["kvplane-boards"]["metadata"]["labels"] == {"grafana_dashboard": "1"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_scraped_has_the_jobs_that_the_rules_name(variant: str, tmp_path: Path) -> None:
    overlay = {"resources": [str(FOLDER / variant)], "components": [str(MONITORS)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    jobs = set()
    for made in objects(tmp_path):
        if made["kind"] != "PodMonitor":
            continue
        monitor = made["spec"]
        chosen = monitor["selector"].get("matchLabels")
        names = [chosen[NAME]] if chosen else monitor["selector"]["matchExpressions"][0]["values"]
        found = [pod for name in names for pod in selected(variant, {NAME: name})]
        for pod in found:
            named = {name for each in pod["spec"]["containers"] for name in ports(each)}
            for end in monitor["podMetricsEndpoints"]:
                assert end["port"] in named
                relabelled = [each["replacement"] for each in end.get("relabelings", ())]
                jobs |= {*(relabelled or [pod["metadata"]["labels"][monitor["jobLabel"]]])}
    rules = (RULES / "prometheus.yml").read_text()
    known = re.findall(r"job_name: (kvplane_\w+)", rules)
    assert jobs == {each for each in known if variant == "serving" or each.endswith("_plane")}


def test_the_layout_of_the_base_is_one() -> None:
    layout = layout_from_json(FOLDER / "base" / "layout.json")
    assert layout == layout_from_hf(Path("models/recall"))
    assert (layout.groups[0].num_kv_heads % 2) == 0  # for the two shards of the fleet
