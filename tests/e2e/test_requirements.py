"""The lock is one point of the ranges in pyproject.toml. Here the client and PlaneCache run with
the oldest and with the newest releases that the ranges admit, and no floor and nothing locked has
a known vulnerability that a later release mends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers.programs import called, printed

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
RANGES = (
    "transformers",
    "grpcio",
    "grpcio-status",
    "grpcio-health-checking",
    "grpcio-reflection",
    "protobuf",
)
"""Packages that are tried at both ends. Each other release of them may rename what is called."""
TESTS = (
    *("tests/e2e/test_plane_cache.py", "tests/rpc/test_command.py"),
    *("tests/rpc/test_sdk_*.py", "tests/rpc/sdk/test_sdk_*.py"),
)
"""``generate`` on a PlaneCache, and the client's calls to running planes."""


def requirements() -> list[Requirement]:
    """Return the packages that pyproject.toml names: the base, every extra, and the build."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    lines = [*document["build-system"]["requires"], *project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        lines += extra
    found = [Requirement(line) for line in lines]
    return [one for one in found if not one.name.startswith("kvplane")]


def floor_of(requirement: Requirement) -> str | None:
    """The oldest release that a requirement admits, where it names one."""
    floors = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    return floors[0] if floors else None


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def install(folder: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*command, "--only-binary", ":all:", *packages], check=True, timeout=600)


def beside(folder: Path) -> dict[str, str]:
    """For a process that imports ``folder``'s packages before those of this environment."""
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


VERSIONS = """
import json, sys
from importlib import import_module, metadata

for name in ("transformers", "grpc", "grpc_health.v1.health", "google.protobuf"):
    assert import_module(name).__file__.startswith(sys.argv[1]), name
json.dump({name: metadata.version(name) for name in sys.argv[2:]}, sys.stdout)
"""


@pytest.mark.parametrize("end", ["floors", "newest"])
def test_both_ends_of_the_ranges_work(end: str, tmp_path: Path) -> None:
    wanted = {one.name: one for one in requirements()}
    floors = {name: floor_of(wanted[name]) for name in RANGES}
    folder = tmp_path / end
    packages = [
        f"{name}=={floors[name]}" if end == "floors" else str(wanted[name]) for name in RANGES
    ]
    install(folder, "--no-deps", *packages)
    asked = [sys.executable, "-c", VERSIONS, str(folder), *RANGES]
    env = beside(folder)
    versions = json.loads(printed(*asked, env=env))
    for name, version in versions.items():
        if end == "floors":
            assert Version(version) == Version(str(floors[name]))
        else:
            assert Version(version) >= Version(locked()[name])
    files = [str(path) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = called(*command, "-m", "not nightly", *files, env=env)
    assert done.returncode == 0, f"{versions}\n{done.stdout}\n{done.stderr}"


def known_vulnerabilities(audit: dict[str, Any]) -> list[str]:
    """Return the findings of pip-audit that a release mends."""
    return [
        f"{package['name']} {package['version']}: {found['id']}, mended in {found['fix_versions']}"
        for package in audit["dependencies"]
        for found in package.get("vulns", ())
        if found["fix_versions"]
    ]


@pytest.mark.parametrize("of", ["floors", "lock.txt", "protos.txt"])
def test_no_release_that_is_asked_for_is_known_to_be_vulnerable(of: str, tmp_path: Path) -> None:
    listed = ROOT / "requirements" / of
    if of == "floors":
        listed = tmp_path / "floors.txt"
        floors = {f"{one.name}=={floor_of(one)}\n" for one in requirements() if floor_of(one)}
        listed.write_text("".join(sorted(floors)))
    install(tmp_path / "tools", "pip-audit>=2.10")
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json"]
    command += ["--vulnerability-service", "osv", "--requirement", str(listed)]
    done = called(*command, env=beside(tmp_path / "tools"), timeout_s=600)
    if not done.stdout and "ConnectionError" in done.stderr:
        why = done.stderr.splitlines()[-1]
        raise SkipTest(f"the database of advisories cannot be reached: {why}")
    audit = json.loads(done.stdout)
    assert len(audit["dependencies"]) == listed.read_text().count("==")
    assert all("vulns" in package for package in audit["dependencies"])
    assert known_vulnerabilities(audit) == []
