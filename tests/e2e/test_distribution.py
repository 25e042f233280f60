"""What ``pip install .`` gives: one pure wheel, whose base needs neither compiler nor torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("kvplane", "control_plane", "data_plane", "engine")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tests", "benchmarks", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = copy / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(out), str(copy)], check=True, timeout=100)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_pure_and_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == "kvplane-0.1.0-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, "kvplane-0.1.0.dist-info"}
    assert not [name for name in names if name.endswith(".so")]


def test_the_wheel_holds_every_module_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi") or path.name == "py.typed"
    }
    assert wanted <= names


def test_the_base_needs_grpc_and_protobuf_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read("kvplane-0.1.0.dist-info/METADATA").decode())
    needs = [n for n in metadata.get_all("Requires-Dist", []) if "extra ==" not in n]
    assert sorted(n.split(">")[0] for n in needs) == ["grpcio", "grpcio-status", "protobuf<8,"]
    assert {"control-plane", "data-plane", "engine", "serving", "dev"} == set(
        metadata.get_all("Provides-Extra", [])
    )


def test_the_client_runs_from_the_wheel_with_its_base_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = """
import sys

absent = ("torch", "numpy", "transformers", "click", "prometheus_client", "grpc_health")
sys.modules.update(dict.fromkeys(absent))  # importing any of these now fails
sys.path.insert(0, sys.argv[1])
import kvplane

for name in kvplane.__all__:
    getattr(kvplane, name)
assert kvplane.__file__.startswith(sys.argv[1])
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path, check=True, timeout=60
    )
