"""Programs that some tests need and that a machine may lack."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NoReturn
from unittest import SkipTest

REASON: Final = "needs: apt install"
_PACKAGES: Final = {
    "alertmanager": "prometheus-alertmanager",
    "cargo": "cargo-web",  # Debian 12's package named cargo is too old for current crates.
    "chromium": "chromium",
    "curl": "curl",
    "debootstrap": "debootstrap",
    "docker-compose": "docker-compose",
    "dockerd": "docker.io",
    "etcd": "etcd-server",
    "etcdctl": "etcd-client",
    "go": "golang-go",
    "ip": "iproute2",
    "nginx": "nginx-light",
    "node": "nodejs",
    "npm": "npm",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
_PROGRAMS: Final = {"alertmanager": "prometheus-alertmanager"}
_GO_PACKAGES: Final = Path("/usr/share/gocode/src/google.golang.org/grpc")


def needs(*tools: str) -> None:
    """Skip the test, with the command that installs the missing program. With
    ``KVPLANE_TESTS=strict``, as ``.ci/run`` sets it, the test fails.
    """
    missing = {_PACKAGES[tool] for tool in tools if not shutil.which(_PROGRAMS.get(tool, tool))}
    if "go" in tools and not _GO_PACKAGES.is_dir():
        missing.add("golang-google-grpc-dev")
    if missing:
        lacks(f"{REASON} {' '.join(sorted(missing))}")


def lacks(reason: str) -> NoReturn:
    """Skip the test for want of what ``reason`` names; fail where ``needs`` does."""
    if os.environ.get("KVPLANE_TESTS") == "strict":
        raise AssertionError(reason)
    raise SkipTest(reason)
