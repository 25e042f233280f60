"""A session from Node, Go, Rust and a shell: admit, attend in every layer, hand in the
receipt, free.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplane import sync
from kvplane.release import release
from kvplane.results import total_of
from tests.e2e.engine_planes import Pair
from tests.helpers import json_caller
from tests.helpers.documents import blocks
from tests.helpers.go_stubs import go, write_stubs
from tests.helpers.programs import printed
from tests.helpers.tools import lacks, needs

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICE = "kvplane.v1.SessionService"
MODEL = ROOT / "models" / "recall"  # that of examples/README.md
ATTENDED = "".join(f"layer {layer}: attention [3{{0}}2{{0}}64]\n" for layer in (0, 1))
# Compilers and registries share the machine with other tests.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(MODEL, tmp_path_factory.mktemp("planes"), pool_id="default") as planes:
        yield planes


@pytest.fixture
def planes(running: Pair) -> Iterator[Pair]:
    yield running
    with sync.ControlClient(running.control.address) as client:
        counted = client.get_counters("default")
    left = counted["sessions"], total_of(counted, "sequences")
    assert left == (0, 0), "a client left something behind"


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """The example with what npm installs, kept under build/ for as long as it asks for the same."""
    needs("npm", "node")
    example, folder = ROOT / "examples" / "node", ROOT / "build" / "clients" / "examples" / "node"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = (example / "package.json").read_text()
    if not (folder / "installed").exists() or (folder / "installed").read_text() != wanted:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(example / name, folder)
        printed("npm", "install", "--no-audit", "--no-fund", "--silent", cwd=folder)
        (folder / "installed").write_text(wanted)
    for file in example.glob("*.js"):
        shutil.copy(file, folder)
    shutil.copytree(ROOT / "protos", folder.parents[1] / "protos", dirs_exist_ok=True)
    return folder


def test_node_attends(planes: Pair, node_folder: Path) -> None:
    said = printed("node", "session.js", planes.control.address, cwd=node_folder)
    assert said == ATTENDED.format(",")


@pytest.mark.nightly  # builds a program; Node.js does the same on push
def test_go_attends(planes: Pair, tmp_path: Path) -> None:
    cache = ROOT / "build" / "clients" / "go-cache"
    write_stubs(tmp_path, cache)
    program = tmp_path / "session"
    source = ROOT / "examples" / "go" / "main.go"
    go("build", "-o", str(program), str(source), path=tmp_path, cache=cache)
    assert printed(str(program), planes.control.address) == ATTENDED.format(" ")


@pytest.mark.nightly
def test_rust_attends(planes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy under build/, beside which cargo keeps what it has compiled of other crates."""
    needs("cargo")
    folder = ROOT / "build" / "clients" / "examples" / "rust"
    built = shutil.ignore_patterns("target")
    shutil.copytree(ROOT / "examples" / "rust", folder, ignore=built, dirs_exist_ok=True)
    shutil.copytree(ROOT / "protos", folder.parents[1] / "protos", dirs_exist_ok=True)
    try:
        printed("cargo", "fetch", cwd=folder)
    except AssertionError:
        lacks("needs crates, from crates.io or from a source that cargo's configuration names")
    monkeypatch.setenv("PROTOC", str(ROOT / "scripts" / "protos.sh"))
    build = ("cargo", "run", "--quiet", "--jobs", "2", "--", planes.control.address)
    assert printed(*build, cwd=folder, timeout_s=300) == ATTENDED.format(", ")


def filled(value: Any, seen: dict[str, Any], name: str = "") -> Any:
    """``value`` with "FROM ABOVE" replaced by what was seen of a field of that name."""
    if isinstance(value, dict):
        return {key: filled(each, seen, key) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, seen) for each in value]
    return seen[name] if value == "FROM ABOVE" else value


def test_the_lines_of_grpcurl_open_admit_free_and_close(planes: Pair) -> None:
    (lines,) = blocks("../examples/README.md", "bash", "grpcurl")
    (_, *listed), *calls = json_caller.lines_of(lines)
    assert listed == ["list", SERVICE]
    assert "Step" in json_caller.methods_of(planes.control.address, SERVICE)
    seen: dict[str, Any] = {}
    answers = []
    for flag, text, _, method in calls:
        assert flag == "-d"
        request = filled(json.loads(text), seen)
        answers.append(json_caller.call(planes.control.address, method, request))
        seen |= answers[-1] | answers[-1].get("layout", {})
    about, pool, opened, admitted, table, freed, closed = answers
    assert about == {"version": release(), "incarnation": about["incarnation"]}
    assert pool["ready"]
    assert opened["session"]
    assert "failures" not in admitted["results"][0]
    assert admitted["plan"]["payload"]
    assert table
    assert "failures" not in freed["results"][0]
    assert closed == {}
