"""Tests that ``pip install .`` gives one pure wheel, whose base needs neither compiler nor torch,
and runs beside the protobuf and the grpcio that an engine pins. The native parts are apart from it,
and from each other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from contextlib import AsyncExitStack
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from kvplane.release import release
from scripts.planes import run_planes
from tests.helpers.planes_in_process import control_plane, data_plane, settings_of
from tests.helpers.programs import printed

ROOT = Path(__file__).resolve().parent.parent.parent
# Compilers and pip share the machine with other tests.
pytestmark = pytest.mark.timeout(600)
PACKAGES = ("kvplane", "control_plane", "data_plane", "engine", "integrations")
INSIDE_KVPLANE = ("engine/", "integrations/")
TOPS = {"kvplane", "control_plane", "data_plane"}
COMMIT = {"KVPLANE_COMMIT": "0123456789ab"}  # as in the build of an image
PROJECT = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree")
    for name in PROJECT:
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "examples", "tests", "benchmarks", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = copy / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(out), str(copy)]
    subprocess.run(command, env=os.environ | COMMIT, check=True, timeout=400)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_pure_and_takes_up_three_names(wheel: Path) -> None:
    assert wheel.name == "kvplane-0.2.0-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {*TOPS, "kvplane-0.2.0.dist-info"}
    assert not [name for name in names if name.endswith(".so")]


def test_the_wheel_holds_every_module_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        in_wheel(path)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if not {"tests", "benchmarks"} & {*path.parts}
        and path.suffix in (".py", ".pyi", ".html", ".js", ".css", ".typed")
    }
    assert wanted <= names


def in_wheel(path: Path) -> str:
    """Where a file of the tree is in the wheel."""
    name = str(path.relative_to(ROOT))
    return f"kvplane/{name}" if name.startswith(INSIDE_KVPLANE) else name


def test_the_base_needs_grpc_protobuf_and_what_the_command_prints_with(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read("kvplane-0.2.0.dist-info/METADATA").decode())
    needs = [n for n in metadata.get_all("Requires-Dist", []) if "extra ==" not in n]
    assert sorted(n.split(">")[0] for n in needs) == [
        "click",
        "grpcio",
        "grpcio-status",
        "protobuf<8,",
        "rich",
    ]
    assert {
        "all",
        "control-plane",
        "data-plane",
        "engine",
        "etcd",
        "events",
        "lmcache",
        "serving",
        "dev",
        "otel",
        "push",
        "ray",
        "router",
        "sglang",
        "transformers",
        "vllm",
    } == set(metadata.get_all("Provides-Extra", []))
    of_plane = [n for n in metadata.get_all("Requires-Dist", []) if 'extra == "data-plane"' in n]
    assert not [n for n in of_plane if n.startswith("transformers")]  # engines pin another


def test_a_source_distribution_holds_what_everything_is_built_from(
    wheel: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns("__pycache__", "build", "node_modules", "*.so")
    for name in (*PACKAGES, "protos", "csrc", "deploy", "docs", "examples"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in (*PROJECT, "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    printed(sys.executable, "-c", build, tmp_path, cwd=tree, env=COMMIT, timeout_s=100)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        names = {name.partition("/")[2] for name in unpacked.getnames()}
    for wanted in (
        "CHANGELOG.md",
        "LICENSE",
        "kvplane/commit.txt",
        "protos/kvplane/v1/session.proto",
        "csrc/CMakeLists.txt",
        "csrc/blocks/bindings/module.cpp",
        "deploy/kubernetes/base/kustomization.yaml",
        "docs/engine-guide.md",
        "examples/node/session.js",
    ):
        assert wanted in names
    of_wheel = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    of_tree = {n.removeprefix("kvplane/") if in_wheel(ROOT / n[8:]) == n else n for n in of_wheel}
    assert of_tree <= names


# What needs more than the base says so on one line.
PROGRAMS = {
    "control_plane": ("control-plane", ["--help"]),
    "data_plane": ("data-plane", ["--help"]),
    "kvplane.engine": ("engine", ["generate", "--model", ".", "--prompt", "a"]),
    "kvplane.integrations.events": ("events", ["--help"]),
    "kvplane.integrations.router": ("router", ["--help"]),
}

ROUND_TRIP = """
import asyncio, sys
from importlib import import_module, metadata

import kvplane
from kvplane.prefixes import tokens_of
from kvplane.release import release
from kvplane.results import ShardBlocks

for name in kvplane.__all__:
    getattr(kvplane, name)
assert release() == f"{kvplane.__version__}+g0123456789ab", release()
for name in ("v1.types", "v1.session", "v1.execution", "plane.v1.registration"):
    import_module(f"kvplane.{name}_pb2")
    import_module(f"kvplane.{name}_pb2_grpc")

async def ask():
    async with kvplane.ControlClient(sys.argv[1]) as client:
        return await client.get_server_info()

async def keep(name, data):
    async with kvplane.ControlClient(sys.argv[1]) as client, client.open_session("pins") as session:
        async with session.open_execution() as execution:
            tokens = tokens_of(name)
            await execution.start((await session.run(kvplane.ops.admit(1, tokens))).plan)
            page = kvplane.Tensor("uint8", (1, 1, len(data)), data)
            await execution.write_blocks(1, [ShardBlocks(page)], keys=[name])
            (kept,) = await execution.read_blocks(1, keys=[name])
            return bytes(kept.blocks.data)

assert asyncio.run(keep(b"chunk", bytes(range(64)))) == bytes(range(64))
assert not {"torch", "numpy", "transformers"} & sys.modules.keys()
print(metadata.version("protobuf"), metadata.version("grpcio"), asyncio.run(ask()).incarnation)
"""


@pytest.mark.nightly  # pip installs an environment
@pytest.mark.parametrize(
    ("protobuf", "grpcio"),
    [
        pytest.param("6.33.5", "1.72.1", id="floors"),
        # Nightly: each installs all of it again.
        pytest.param("7.34.0", "1.81.0", id="first-7", marks=pytest.mark.nightly),
        pytest.param("6.33.5", "1.85.3", id="vllm-0.32", marks=pytest.mark.nightly),
        pytest.param("6.33.6", "1.81.1", id="sglang-0.5.23", marks=pytest.mark.nightly),
        pytest.param("6.33.6", "1.78.0", id="lmcache-0.5.6", marks=pytest.mark.nightly),
    ],
)
async def test_the_client_reaches_a_control_plane_beside_what_an_engine_pins(
    wheel: Path, tmp_path: Path, protobuf: str, grpcio: str
) -> None:
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    pins = [f"protobuf=={protobuf}", f"grpcio=={grpcio}", f"grpcio-status=={grpcio}"]
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", str(wheel)]
    subprocess.run([*command, "--only-binary", ":all:", *pins], check=True, timeout=400)
    pages: dict[str, Any] = {"opaque_page_bytes": 64, "model_id": "engine"}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(control_plane(incarnation=7))
        given = settings_of("pins", server.address, Path(), **pages) | {"layout": None}
        await stack.enter_async_context(data_plane(**given))
        client = await asyncio.create_subprocess_exec(
            *(python, "-I", "-W", "error", "-c", ROUND_TRIP, server.address),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(client.communicate(), 60)
        asked = await asyncio.create_subprocess_exec(
            *(python, "-I", "-m", "kvplane", "--control-plane", server.address, "version"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        version, _ = await asyncio.wait_for(asked.communicate(), 60)
    assert said.decode().split() == [protobuf, grpcio, "7"]
    assert (asked.returncode, release().encode() in version) == (0, True)
    assert (tmp_path / "venv" / "bin" / "kvplane").exists()
    for program, (extra, command) in PROGRAMS.items():
        done = await asyncio.create_subprocess_exec(
            *(python, "-I", "-m", program, *command), cwd=tmp_path, stderr=asyncio.subprocess.PIPE
        )
        _, error = await asyncio.wait_for(done.communicate(), 60)
        assert done.returncode == 1
        assert error.decode().startswith(f"{program.rpartition('.')[2]}: error: ")
        assert error.decode().endswith(f"is not installed: pip install 'kvplane[{extra}]'\n")


def source_distribution(folder: Path, out: Path) -> Path:
    """Make the source distribution of what scikit-build-core builds in ``folder``."""
    program = (
        "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=folder, check=True, timeout=60)
    (archive,) = out.glob("*.tar.gz")
    return archive


def test_the_kernels_and_the_blocks_have_no_source_in_common(tmp_path: Path) -> None:
    sources = []
    for name in ("csrc", "csrc/blocks"):
        (tmp_path / name).mkdir(parents=True)
        with tarfile.open(source_distribution(ROOT / name, tmp_path / name)) as archive:
            names = archive.getnames()
        sources.append({name.partition("/")[2] for name in names})
    kernels, blocks = sources
    assert "cpu/paged_attention.cpp" in kernels
    assert not [name for name in kernels if "blocks/" in name]
    assert "index/hash.cpp" in blocks
    assert kernels & blocks == {"CMakeLists.txt", "PKG-INFO", "pyproject.toml"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_both_planes_and_the_engine_run_from_wheels_in_a_bare_environment(
    wheel: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    build += ["--config-settings=cmake.define.KVPLANE_WERROR=ON"]
    for name in ("csrc", "csrc/blocks"):
        sources = tmp_path / "sources" / name
        sources.mkdir(parents=True)
        given = ("--wheel-dir", tmp_path, source_distribution(ROOT / name, sources))
        printed(*build, *given, env={"PATH": path, "KVPLANE_CUDA": "OFF"}, timeout_s=1800)
    (blocks,) = tmp_path.glob("kvplane_blocks-*.whl")
    package = {n for n in zipfile.ZipFile(blocks).namelist() if ".dist-info/" not in n}
    assert sorted(Path(name).suffix for name in package) == [".py", ".pyi", ".so", ".typed"]
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    pip += ["--find-links", str(tmp_path), "--constraint", str(ROOT / "requirements" / "lock.txt")]
    # A control plane needs neither kernels nor torch.
    for extras, module in (
        ("control-plane", "control_plane.server.server"),
        ("control-plane,data-plane,engine,otel", "kvplane.engine"),
    ):
        package = f"kvplane[{extras}] @ {wheel.as_uri()}"
        install = [*pip, "--only-binary", ":all:", package]
        subprocess.run(install, env=alone, check=True, timeout=1800)
        subprocess.run([python, "-I", "-c", f"import {module}"], cwd=tmp_path, check=True)
    modules = sorted(
        name.removesuffix(".py").replace("/", ".")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".py") and not name.endswith(("__init__.py", "__main__.py"))
        if name.startswith(("control_plane/", "data_plane/", "kvplane/engine/"))
    )
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([python, "-I", "-c", program, *modules], cwd=tmp_path, check=True, timeout=300)

    model = str(ROOT / "models" / "recall")
    with run_planes(
        tmp_path,
        ["--model", model, "--num-device-blocks", "64"],
        python=(python, "-I"),
    ) as planes:
        command = [python, "-I", "-m", "kvplane.engine", "generate", "--model", model]
        command += ["--control-plane", planes.control.address, "--prompt", "abc=xyz;?abc="]
        answer = printed(*command, "--max-tokens", "4", cwd=tmp_path, timeout_s=300)
    assert answer.strip() == "xyz;"
