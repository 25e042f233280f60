"""The container files agree with each other and with the programs they run."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from control_plane.server.config import ControlPlaneSettings
from data_plane.server.config import DataPlaneSettings
from engine.serving.config import ServeSettings
from examples import load as example
from kvplane.integrations.router.config import RouterSettings
from kvplane.serving.settings import parse

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ON_A_GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ["control-plane", "data-plane", "engine"]
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))


WATCHERS = ["prometheus", "alertmanager", "grafana"]


def test_the_compose_file_runs_an_engine_on_both_planes_and_what_watches_them() -> None:
    started = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert started == {"control-plane", "data-plane", "engine", *WATCHERS}
    assert set(SERVICES) - started == {"load", "router"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_of_this_machine_and_is_started_again_when_it_dies_unless_it_is_a_job(
    name: str,
) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "network_mode" not in service, "it would lose its network when another restarts"
    restarts = service.get("restart") == "unless-stopped"
    assert restarts == ("job" not in service.get("profiles", []))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_bounds_and_few_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    assert all("size=" in each for each in service["tmpfs"]), "half the machine's memory otherwise"
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


def test_nobody_logs_in_to_grafana_so_there_is_no_password_to_guess() -> None:
    given = SERVICES["grafana"]["environment"]
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert given["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert given["GF_AUTH_BASIC_ENABLED"] == "false"
    assert given["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_the_load_job_is_an_example_with_its_options() -> None:
    load = SERVICES["load"]
    assert load["entrypoint"] == ["python", "/examples/load.py"]
    assert {"./examples:/examples:ro", "./models:/models:ro"} <= set(load["volumes"])
    assert example.arguments(load["command"]).control_plane == "control-plane:50051"


def test_what_the_watchers_are_given_is_there() -> None:
    for name in WATCHERS:
        for volume in SERVICES[name]["volumes"]:
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), volume
    grafana = SERVICES["grafana"]
    provider = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/dashboards/kvplane.yml").read_text()
    )
    folder = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/boards:{folder}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "deploy/grafana/boards" / Path(home).name).is_file()


def test_jobs_and_clients_on_the_host_reach_the_data_plane_by_one_name() -> None:
    (advertised,) = [w for w in SERVICES["data-plane"]["command"] if "--advertise" in w]
    assert advertised == "--advertise=data-plane:50052"
    assert "127.0.0.1:50052:50052" in SERVICES["data-plane"]["ports"]
    head = (ROOT / "docker-compose.yml").read_text().partition("x-build-args")[0]
    assert "\n#   127.0.0.1 data-plane\n" in head


def test_jobs_find_the_socket_of_shared_memory_where_the_data_plane_has_it() -> None:
    (folder,) = [w for w in SERVICES["data-plane"]["command"] if "--local-folder" in w]
    mounted = f"sockets:{folder.partition('=')[2]}"
    assert mounted in SERVICES["data-plane"]["volumes"]
    for job in ("engine", "load"):
        assert f"{mounted}:ro" in SERVICES[job]["volumes"]
    options = COMPOSE["volumes"]["sockets"]["driver_opts"]
    assert options["type"] == options["device"] == "tmpfs"
    for path in DOCKERFILES:
        (uid,) = re.findall(r"useradd .*--uid (\d+)", path.read_text())
        assert {f"uid={uid}", "mode=0700"} < {*options["o"].split(",")}


def test_the_engine_serves_where_the_head_of_the_compose_file_says(tmp_path: Path) -> None:
    service = SERVICES["engine"]
    program, *words = [word.replace("/models/recall", str(tmp_path)) for word in service["command"]]
    config = parse(ServeSettings, f"engine {program}", words, {})
    assert config.bind == "0.0.0.0:8000"
    assert config.control_plane == "control-plane:50051"
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["healthcheck"]["test"] == ["CMD", "healthy", "8000", "/health"]
    head = (ROOT / "docker-compose.yml").read_text().partition("x-build-args")[0]
    assert "http://127.0.0.1:8000/v1 " in head and 'model "recall"' in head


def test_the_router_sends_requests_to_the_engine(tmp_path: Path) -> None:
    words = [w.replace("/models/recall", str(tmp_path)) for w in SERVICES["router"]["command"]]
    config = parse(RouterSettings, "router", words, {})
    assert config.engine == "http://engine:8000=default"
    assert config.bind == "0.0.0.0:8000"


def test_every_variable_of_the_compose_file_has_a_value_in_the_env_file() -> None:
    lines = (ROOT / ".env").read_text().splitlines()
    given = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    named = set(re.findall(r"\$\{(\w+)\}", (ROOT / "docker-compose.yml").read_text()))
    assert named == given


@pytest.mark.parametrize("plane", ["control-plane", "data-plane"])
def test_a_planes_health_is_asked_where_it_serves_metrics(plane: str) -> None:
    config = ControlPlaneSettings if plane == "control-plane" else DataPlaneSettings
    port = str(config.metrics_port)
    assert SERVICES[plane]["healthcheck"]["test"] == ["CMD", "healthy", port]
    dockerfile = (ROOT / SERVICES[plane]["build"]["dockerfile"]).read_text()
    assert f'CMD ["healthy", "{port}"]' in dockerfile
    assert "COPY deploy/healthy.sh /usr/local/bin/healthy" in dockerfile


def is_sent(path: str, ignored: str) -> bool:
    """Whether docker's client sends a file to the build: the last pattern that matches the file, or
    a folder that it is in, decides.
    """
    inside = PurePosixPath(path)
    names = [str(each) for each in (inside, *inside.parents)]
    sent = True
    for line in ignored.split():
        pattern = line.removeprefix("!")
        ends = (pattern, pattern.removeprefix("**/"))
        if any(fnmatchcase(name, end) for name in names for end in ends):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_passes_the_dockerignore(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    text = path.read_text()
    copied = chain.from_iterable(
        line.split()[1:-1] for line in text.splitlines() if re.match(r"COPY (?!--from)", line)
    )
    used = {*copied, *re.findall(r"deploy/[a-z_]+\.sh", text)} - {"."}
    assert "deploy/install.sh" in used or "deploy/healthy.sh" in used
    assert [name for name in sorted(used) if not is_sent(name, ignored)] == []
    assert not is_sent("deploy/healthy.sh", ignored.replace("!deploy/healthy.sh\n", ""))
    assert not is_sent("tests/test_tidy.py", ignored) and is_sent("kvplane/ops.py", ignored)
    assert not is_sent("kvplane/__pycache__/ops.pyc", ignored)


@pytest.mark.parametrize("name", ["data-plane", "engine", "load"])
def test_what_needs_a_plane_waits_until_it_is_healthy(name: str) -> None:
    waits = SERVICES[name]["depends_on"]
    assert waits["control-plane"] == {"condition": "service_healthy"}
    assert name == "data-plane" or waits["data-plane"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_no_root_no_compiler_and_an_authority_that_is_empty_by_default(
    path: Path,
) -> None:
    *_, build, final = path.read_text().split("\nFROM ")
    assert 'ARG CA_BUNDLE=""' in build
    assert "\nUSER kvplane\n" in final
    assert final.index("USER kvplane") < final.index("ENTRYPOINT")
    assert "apt-get" not in final


@pytest.mark.parametrize("name", OURS)
def test_an_image_builds_the_native_part_that_its_extra_needs(name: str) -> None:
    folders = {"kvplane-kernels": "./csrc", "kvplane-blocks": "./csrc/blocks"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [need.partition("==")[0] for need in extras["optional-dependencies"][name]]
    native = "".join(f"{folders[need]} " for need in needs if need in folders)
    dockerfile = (ROOT / SERVICES[name]["build"]["dockerfile"]).read_text()
    # The image has what the plane's options need beside the plane: an election, a model's config.
    beside = {"control-plane": ",etcd", "data-plane": ",transformers"}
    installed = name + beside.get(name, "")
    assert f'\nRUN deploy/install.sh {native}".[{installed}]"\n' in dockerfile
    assert ("libxxhash-dev" in dockerfile) == ("kvplane-blocks" in needs)


def test_the_commands_of_the_compose_file_are_settings_that_the_programs_take(
    tmp_path: Path,
) -> None:
    def command(name: str) -> list[str]:
        # The model is a volume of the container; here any folder will do.
        return [word.replace("/models/recall", str(tmp_path)) for word in SERVICES[name]["command"]]

    control = parse(ControlPlaneSettings, "control_plane", command("control-plane"), {})
    data = parse(DataPlaneSettings, "data_plane", command("data-plane"), {})
    assert control.bind == "0.0.0.0:50051"
    assert data.control_plane == "control-plane:50051"


def test_on_a_gpu_the_data_plane_is_built_with_cuda_given_a_gpu_and_told_to_use_it() -> None:
    assert set(ON_A_GPU["services"]) == {"data-plane"}
    service = ON_A_GPU["services"]["data-plane"]
    dockerfile = (ROOT / SERVICES["data-plane"]["build"]["dockerfile"]).read_text()
    for argument in service["build"]["args"]:
        assert f"\nARG {argument}=" in dockerfile
    assert service["build"]["args"]["KVPLANE_CUDA"] == "ON"
    assert service["build"]["args"]["KVPLANE_TORCH"] == "", "torch's CPU build finds no GPU"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    command = [word for word in SERVICES["data-plane"]["command"] if "model" not in word]
    config = parse(DataPlaneSettings, "data_plane", [*command, "--model=."], service["environment"])
    assert config.device == "cuda", "no GPU is then an error and not a slow data plane"
    assert service["image"] != SERVICES["data-plane"]["image"]


def test_prometheus_scrapes_every_program_where_it_serves_metrics() -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = {
        target
        for job in settings["scrape_configs"]
        for static in job.get("static_configs", ())
        for target in static["targets"]
    }
    assert targets == {
        f"control-plane:{ControlPlaneSettings.metrics_port}",
        f"data-plane:{DataPlaneSettings.metrics_port}",
        "engine:8000",
    }
    found = settings["scrape_configs"][-1]["dns_sd_configs"]
    assert [(each["names"], each["port"]) for each in found] == [(["router"], 8000)]
