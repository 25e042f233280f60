"""A Docker daemon for one test, with images that come from no registry.

Everything that it has is in one folder, and everything that it starts dies with it. While it
builds, it has this machine's network; while it runs containers, one of its own, so that its bridges
and filters are nobody else's.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import SkipTest

from packaging.requirements import Requirement

from tests.helpers.programs import called, printed
from tests.helpers.tools import needs

ROOT: Final = Path(__file__).resolve().parents[2]
PYTHON_IMAGE: Final = "kvplane-tests/python:bookworm"
"""Stands in for python:3.11-slim-bookworm: Debian 12 with its own Python, 3.11 too."""
_BRIDGELESS: Final = ("--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false")
_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_BUILD_TOOLS: Final = ("cmake", "ninja")  # scikit-build-core asks for them by itself
_START_S: Final = 60


def needs_daemon() -> None:
    """Skip the test where no Docker daemon can run, for want of programs or of rights."""
    needs("debootstrap", "docker-compose", "dockerd")
    may = subprocess.run(["unshare", *_NAMESPACES, "--net", "true"], capture_output=True)
    if os.geteuid() != 0 or may.returncode != 0:
        raise SkipTest("a Docker daemon needs root, and namespaces of its own")


class DockerDaemon:
    """``folder``: new and with a short name, as Unix sockets are made deep in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = os.environ | {
            "DOCKER_HOST": f"unix://{folder}/sock",
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_PROJECT_NAME": "kvplane-tests",
            "COMPOSE_HTTP_TIMEOUT": "300",
            "PYTHON_IMAGE": PYTHON_IMAGE,
            "KVPLANE_TORCH": "cpu",
        }

    @contextmanager
    def builds(self) -> Iterator[None]:
        """Run with the machine's network, for builds that use it too."""
        with self._runs(_BRIDGELESS, ()):
            yield

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Run with a network of its own."""
        with self._runs((), ("--net",)):
            self.enter("ip", "link", "set", "lo", "up")
            yield

    @contextmanager
    def _runs(self, options: Sequence[str], namespaces: Sequence[str]) -> Iterator[None]:
        command = ["unshare", *_NAMESPACES, *namespaces, "--", "dockerd", *options]
        command += ["--storage-driver=overlay2", f"--host=unix://{self.folder}/sock"]
        command += [f"--{name}={self.folder / name}" for name in ("data-root", "exec-root")]
        command += [f"--pidfile={self.folder}/pid"]
        # One of a daemon that was killed: 1, which is always some process's.
        (self.folder / "pid").unlink(missing_ok=True)
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + _START_S
            while not self._answers():
                assert self._process.poll() is None and time.monotonic() < deadline_s, self.log()
                time.sleep(0.2)
            yield
        finally:
            self._stop()

    def _stop(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.main_pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        return called("docker", "version", env=self.environment).returncode == 0

    @property
    def main_pid(self) -> int:
        """The daemon's pid on this machine: only child of the process that made its namespaces."""
        assert self._process is not None
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def log(self) -> str:
        """Return the end of the daemon's log."""
        return (self.folder / "dockerd.log").read_text()[-4000:]

    def enter(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command in the daemon's network; return its output."""
        return printed(
            "nsenter", f"--target={self.main_pid}", "--net", *command, timeout_s=timeout_s
        )

    def docker(self, *arguments: str, timeout_s: float = 300) -> str:
        """Run ``docker``; return its output."""
        return printed("docker", *arguments, env=self.environment, timeout_s=timeout_s)

    def logs(self, container: str) -> str:
        """Return a container's output, of both streams."""
        command = ["docker", "logs", container]
        done = subprocess.run(command, env=self.environment, stdout=-1, stderr=-2, check=True)
        return done.stdout.decode()

    def compose(self, *arguments: str, files: Sequence[Path] = (), timeout_s: float = 300) -> str:
        """Run ``docker-compose`` on the project's file and on ``files``; return its output."""
        named = [f"--file={path}" for path in (ROOT / "docker-compose.yml", *files)]
        command = ["docker-compose", f"--project-directory={ROOT}", *named, *arguments]
        return printed(*command, env=self.environment, timeout_s=timeout_s)

    def container(self, service: str) -> dict[str, Any]:
        """Return the daemon's description of a service's container."""
        (found,) = self.compose("ps", "--quiet", service).split()
        (described,) = json.loads(self.docker("inspect", found))
        return dict(described)

    def kill_9(self, service: str) -> None:
        """Kill the main process of a service's container, as the kernel would: a daemon that kills
        a container on request does not restart it.
        """
        pid = self.container(service)["State"]["Pid"]
        here = ["nsenter", f"--target={self.main_pid}", "--pid"]
        printed(*here, "kill", "-9", str(pid), timeout_s=10)

    def import_python(self, find_links: str) -> None:
        """Make ``PYTHON_IMAGE``, whose pip looks for packages at ``find_links`` alone."""
        tree = self.folder / "python"
        included = "--include=ca-certificates,python3,python3-dev,python3-venv"
        printed("debootstrap", "--variant=minbase", included, "bookworm", tree, timeout_s=900)
        (tree / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        pip = f"[global]\nno-index = true\nfind-links = {find_links}\n"
        (tree / "etc/pip.conf").write_text(pip)
        shutil.rmtree(tree / "var/cache/apt/archives", ignore_errors=True)
        packed = ["tar", "--create", f"--directory={tree}", "."]
        with subprocess.Popen(packed, stdout=subprocess.PIPE) as made:
            subprocess.run(
                ["docker", "import", "-", PYTHON_IMAGE],
                env=self.environment, stdin=made.stdout, stdout=subprocess.DEVNULL,
                check=True, timeout=600,
            )  # fmt: skip
        assert made.returncode == 0
        shutil.rmtree(tree)


def download_wheels(folder: Path, extras: Sequence[str]) -> None:
    """Download the packages of the images' builds, at the locked versions, with this environment's
    pip and settings: ``extras`` of the project, and the build tools of it and its native parts.
    """
    project = _toml(ROOT / "pyproject.toml")["project"]
    wanted = {*project["dependencies"], *_BUILD_TOOLS}
    left = [*extras]
    while left:
        for each in map(Requirement, project["optional-dependencies"][left.pop()]):
            if each.name == "kvplane":
                left += each.extras
            elif not each.name.startswith("kvplane-"):
                wanted.add(str(each))
    for path in ("pyproject.toml", "csrc/pyproject.toml", "csrc/blocks/pyproject.toml"):
        wanted |= {*_toml(ROOT / path)["build-system"]["requires"]}
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={folder}"]
    command += ["--only-binary=:all:", "--constraint", str(ROOT / "requirements/lock.txt")]
    printed(*command, *sorted(wanted), timeout_s=1200)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a page of the files of ``folder``; yield its address, on loopback."""
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
