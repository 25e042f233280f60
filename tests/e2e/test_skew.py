"""The release before this one works beside it in each of its three places: control plane, data
plane and engine.

The other release is the last tag ``wire-*``; KVPLANE_SKEW_BASE names another commit. It is
installed, from its own sources, into a virtual environment that finds all else in this one.
"""

from __future__ import annotations

import json
import os
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_planes import ROOT, Process
from transformers import AutoTokenizer

from kvplane.release import release
from tests.helpers.programs import called, printed
from tests.helpers.waiting import wait_until

# The native parts may have to be compiled, which takes minutes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
MODEL = ROOT / "models" / "recall"
TAGS = "wire-*"
# What the second prompt shares with the first is found cached.
PROMPTS = ["kqz:mfa; wbt:rce; jun:pol; kqz:", "kqz:mfa; wbt:rce; jun:pol; wbt:"]
NATIVE_PARTS = {"csrc/blocks": ["csrc/blocks"], "csrc": ["csrc", ":!csrc/blocks"]}


@dataclass(frozen=True)
class Release:
    """One release, installed: how its programs are run, and what they say that they are."""

    python: Path
    folder: Path
    engine: str
    version: str

    def run(self, *arguments: str) -> str:
        """Return what a program prints. Fails unless it ends well."""
        return printed(self.python, "-m", *arguments, cwd=self.folder, timeout_s=300)

    def serve(self, program: str, log: Path, *arguments: str) -> Process:
        return Process(program, log, *arguments, python=self.python, folder=self.folder)


HERE = Release(Path(sys.executable), ROOT, "engine", release())


def git(*arguments: str) -> str:
    return printed("git", *arguments).strip()


def base_commit() -> str:
    """The commit to build. A clone may lack tags: then it is the commit that brought the contract's
    last baseline, which is the one that is tagged.
    """
    named = os.environ.get("KVPLANE_SKEW_BASE")
    if not named:
        tags = git("tag", "--list", TAGS, "--merged", "HEAD", "--sort=-creatordate").split()
        baseline = ("--diff-filter=A", "--", f"protos/{TAGS}.binpb")
        named = tags[0] if tags else git("log", "-1", "--format=%H", *baseline)
    return git("rev-parse", "--verify", f"{named}^{{commit}}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The other release, built. Native parts that do not differ are those of this environment."""
    commit = base_commit()
    folder = tmp_path_factory.mktemp("base")
    tree, environment = folder / "tree", folder / "venv"
    tree.mkdir()
    archive = folder / "tree.tar"
    git("archive", "--output", str(archive), commit)
    printed("tar", "-xf", archive, "-C", tree)
    venv.create(environment)
    python = environment / "bin" / "python"
    [packages] = (environment / "lib").glob("python*/site-packages")
    # A .pth in an added folder is not read, so this checkout is not found through it.
    (here,) = (Path(path) for path in sys.path if (Path(path) / "grpc").is_dir())
    (packages / "rest.pth").write_text(f"{here}\n")
    parts = [part for part, paths in NATIVE_PARTS.items() if git("diff", commit, "--", *paths)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-build-isolation", "--ignore-installed"),
        *(f"./{part}" for part in [*parts, "."]),
        cwd=tree,
        env={"KVPLANE_COMMIT": commit[:12], "PATH": path},
    )
    program = "import kvplane.release as r; print(r.__file__, r.release())"
    said = printed(python, "-c", program, cwd=folder)
    file, version = said.split()
    assert file.startswith(str(packages)) and version.endswith(f"+g{commit[:12]}"), said
    return Release(python, folder, "kvplane.engine", version)


def answers(control: Release, data: Release, engine: Release, folder: Path) -> list[str]:
    """Run these releases together: two prompts are continued, then the index is read. Returns what
    the engine printed.
    """
    folder.mkdir(exist_ok=True)
    logs = {name: folder / f"{name}.log" for name in ("control", "data")}
    control_plane = control.serve("control_plane", logs["control"])
    data_plane = data.serve(
        *("data_plane", logs["data"], "--control-plane", control_plane.address),
        *("--model", str(MODEL), "--num-device-blocks", "64", "--num-host-blocks", "8"),
        *("--dtype", "float32"),  # an older release's default differs
    )
    at = ("--control-plane", control_plane.address)
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    try:
        control_plane.start()
        data_plane.start()
        wait_ready(engine, at, logs)
        [told] = json.loads(engine.run("kvplane", "--json", *at, "version"))
        assert told["client"] == engine.version
        assert told["control_plane"] == control.version
        assert f"settings release={data.version} " in logs["data"].read_text()
        printed = engine.run(
            *(engine.engine, "generate", *at, "--model", str(MODEL), "--max-tokens", "12"),
            *("--prompts-file", str(prompts), "--n", "2", "--temperature", "0"),
        )
        tokens = AutoTokenizer.from_pretrained(MODEL)(PROMPTS[0])["input_ids"]
        ids = ",".join(map(str, tokens))
        [found] = json.loads(engine.run("kvplane", "--json", *at, "lookup", ids))
        assert found["device_tokens"] >= 16, found
    finally:
        data_plane.stop()
        control_plane.stop()
    return printed.splitlines()


def wait_ready(engine: Release, at: tuple[str, str], logs: dict[str, Path]) -> None:
    """Wait until the pool can be used."""

    def is_ready() -> bool:
        command = (engine.python, "-m", "kvplane", *at, "--timeout-s", "2", "status")
        done = called(*command, cwd=engine.folder)
        return done.returncode == 0 and "yes" in done.stdout

    wait_until(is_ready, 120, lambda: [log.read_text()[-2000:] for log in logs.values()])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What this release prints by itself."""
    return answers(HERE, HERE, HERE, tmp_path_factory.mktemp("here"))


@pytest.mark.parametrize(
    "of_base",
    [
        {"control"},
        {"data"},
        {"engine"},
        {"control", "data"},
        {"control", "engine"},
        {"data", "engine"},
    ],
    ids="-".join,
)
def test_the_release_before_works_as(
    of_base: set[str], base: Release, expected: list[str], tmp_path: Path
) -> None:
    control, data, engine = (
        base if place in of_base else HERE for place in ("control", "data", "engine")
    )
    assert answers(control, data, engine, tmp_path) == expected
