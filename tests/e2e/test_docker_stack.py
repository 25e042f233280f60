"""The images are built, and what docker-compose.yml runs outlives a restart of either plane."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.docker_daemon import ROOT, DockerDaemon, download_wheels, needs_daemon, served
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(5400)]
IMAGES = ("control-plane", "data-plane", "engine")
PLANES = ("data-plane", "control-plane")
PATIENCE_S = 180.0
AWAY_S = 60.0
"""For how long a plane's restart may keep an engine from answering."""
ASK = """
import json, sys, time, urllib.request

body = {"model": "recall", "prompt": "abc=xyz;def=uvw;ghi=rst;.?def=", "temperature": 0}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions",
    json.dumps({**body, "max_tokens": 3}).encode(),
    {"Content-Type": "application/json"},
)
while True:
    answer = {"asked_s": time.time()}
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer["text"] = json.load(response)["choices"][0]["text"]
    except (OSError, ValueError) as error:
        answer["error"] = repr(error)
    print(json.dumps(answer), flush=True)
    time.sleep(0.2)
"""
METRICS = """
import urllib.request

print(urllib.request.urlopen("http://127.0.0.1:9102/metrics").read().decode())
"""


@pytest.fixture
def daemon() -> Iterator[DockerDaemon]:
    """With the project's images, as docker-compose builds them."""
    needs_daemon()
    folder = Path(tempfile.mkdtemp(prefix="kvplane-", dir="/var/tmp"))
    try:
        daemon = DockerDaemon(folder)
        (folder / "wheels").mkdir()
        download_wheels(folder / "wheels", IMAGES)
        on_host = {name: {"build": {"network": "host"}} for name in IMAGES}
        (folder / "on_host.yml").write_text(json.dumps({"services": on_host}))
        with served(folder / "wheels") as page, daemon.builds():
            daemon.import_python(page)
            files = [folder / "on_host.yml"]
            daemon.compose("build", *IMAGES, files=files, timeout_s=3600)
        yield daemon
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def stack(daemon: DockerDaemon) -> Iterator[DockerDaemon]:
    """Both planes, in containers."""
    with daemon.runs():
        daemon.compose("up", "--detach", *PLANES)
        try:
            for plane in PLANES:
                wait_healthy(daemon, plane)
            yield daemon
        finally:
            sys.stdout.write(daemon.compose("logs", "--no-color", "--tail=50"))
            daemon.compose("down", "--volumes")


def wait_healthy(stack: DockerDaemon, service: str, num_restarts: int = 0) -> None:
    def is_healthy() -> bool:
        found = stack.container(service)
        is_new = found["RestartCount"] >= num_restarts
        return is_new and found["State"].get("Health", {}).get("Status") == "healthy"

    wait_until(is_healthy, PATIENCE_S, lambda: stack.container(service)["State"])


@contextmanager
def asked(stack: DockerDaemon, log: Path) -> Iterator[None]:
    """Ask the engine for a known answer, five times a second, and write to ``log`` what came."""
    command = ["nsenter", f"--target={stack.main_pid}", "--net", sys.executable, "-c", ASK]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def answers(log: Path) -> list[dict[str, Any]]:
    *whole, _ = log.read_text().split("\n")
    return [json.loads(line) for line in whole]


def wait_answered(log: Path, bound_s: float) -> None:
    """Until a question that is asked from now on is answered; what failed meanwhile may fail."""
    begin_s = time.time()

    def asked_since() -> list[dict[str, Any]]:
        return [each for each in answers(log) if each["asked_s"] >= begin_s]

    wait_until(lambda: any("text" in each for each in asked_since()), bound_s, asked_since)


def wait_shared(stack: DockerDaemon, num_clients: int) -> None:
    """Until so many clients share memory with the data plane."""

    def num_shared() -> float:
        page = stack.compose("exec", "-T", "data-plane", "python", "-c", METRICS)
        (value,) = re.findall(r"^kvplane_local_regions(?:{.*})? (\S+)$", page, re.MULTILINE)
        return float(value)

    wait_until(lambda: num_shared() == num_clients, AWAY_S, num_shared)


def words_of_the_head() -> list[str]:
    """What runs an engine that serves, by the compose file's own words."""
    head = (ROOT / "docker-compose.yml").read_text().replace(" \\\n#", "")
    (words,) = re.findall(r"docker-compose run --rm (--publish \S+ engine serve .*)", head)
    return str(words).split()


def check_a_client_on_the_host(stack: DockerDaemon, tmp_path: Path) -> None:
    """It finds the data plane by the line for /etc/hosts."""
    load = [str(ROOT / "examples" / "load.py"), "--duration-s", "2"]
    load += ["--model", str(ROOT / "models" / "recall")]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.1 data-plane\n")
    with_hosts = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']
    out = stack.enter(*with_hosts, str(hosts), sys.executable, *load)
    assert re.search(r"^[1-9]\d* requests, .* 0 sessions lost$", out, re.MULTILINE), out


def check_that_an_engine_and_load_outlive_kills(stack: DockerDaemon, tmp_path: Path) -> None:
    log = tmp_path / "answers"
    engine = stack.compose("run", "--detach", *words_of_the_head()).split()[-1]
    with asked(stack, log):
        wait_answered(log, PATIENCE_S)
        load = stack.compose(
            "run",
            "--detach",
            "load",
            "control-plane:50051",
            "--model",
            "/models/recall",
            "--duration-s",
            "120",
        ).split()[-1]
        wait_shared(stack, 2)
        for plane in PLANES:
            stack.kill_9(plane)
            wait_answered(log, AWAY_S)
            wait_healthy(stack, plane, num_restarts=1)
            wait_answered(log, AWAY_S)
            wait_shared(stack, 2)
        assert stack.docker("wait", load).strip() == "0", stack.logs(load)
    assert {each["text"] for each in answers(log) if "text" in each} == {"uvw"}
    assert re.search(r"^[1-9]\d* requests, .* 2 sessions lost$", stack.logs(load), re.MULTILINE)
    assert "no shared memory" not in stack.logs(engine)


def test_the_images_are_built_and_their_containers_outlive_a_kill_of_each_plane(
    stack: DockerDaemon, tmp_path: Path
) -> None:
    check_a_client_on_the_host(stack, tmp_path)
    check_that_an_engine_and_load_outlive_kills(stack, tmp_path)
