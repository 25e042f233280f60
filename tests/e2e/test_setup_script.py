"""``make`` says what the machine lacks, before it makes anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import called

ROOT = Path(__file__).resolve().parent.parent.parent
COREUTILS = (
    *("bash", "cat", "cut", "dirname", "env", "find", "grep", "id", "sh", "sha256sum", "sort"),
    *("test", "xargs"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make as much of a fresh clone as the script looks at before it installs."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def setup(tree: Path, **environ: str) -> tuple[int, list[str]]:
    done = called("scripts/setup.sh", cwd=tree, env={"KVPLANE_APT": "off", **environ}, timeout_s=60)
    assert not (tree / ".venv").exists()
    return done.returncode, (done.stdout + done.stderr).splitlines()


def missing(*packages: str) -> list[str]:
    """The one line that a user can copy."""
    wanted = " ".join(packages)
    return [f"setup: packages are missing; on Debian: sudo apt-get install -y {wanted}"]


def test_everything_that_is_missing_is_named_at_once(tree: Path) -> None:
    assert setup(tree, CXX="no-such-compiler") == (1, missing("g++", "libxxhash-dev"))
    compiler = tree / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ -nostdinc "$@"\n')  # finds no header at all
    compiler.chmod(0o755)
    assert setup(tree, CXX=str(compiler)) == (1, missing("libxxhash-dev"))


@pytest.mark.parametrize("is_old", [False, True])
def test_without_a_new_enough_python_it_names_the_packages(tree: Path, is_old: bool) -> None:
    old = tree / "old"
    old.write_text("#!/bin/sh\nexit 1\n")  # what a Python 3.10 answers to the version check
    old.chmod(0o755)
    python = str(old) if is_old else "no-such-python"
    pythons = ("python3", "python3-venv", "python3-dev")
    assert setup(tree, PYTHON=python) == (1, missing(*pythons))


def test_on_a_bare_machine_it_names_all_of_it(tree: Path) -> None:
    tools = tree / "bin"
    tools.mkdir()
    for name in COREUTILS:
        path = shutil.which(name)
        assert path is not None
        (tools / name).symlink_to(path)
    code, lines = setup(tree, PATH=str(tools))
    everything = ("g++", "libxxhash-dev", "python3", "python3-venv", "python3-dev")
    assert (code, lines) == (1, missing(*everything))


def test_as_root_it_says_what_it_installs_and_installs_all_at_once(tree: Path) -> None:
    """With an apt-get that only notes what it is told."""
    tools = tree / "bin"
    tools.mkdir()
    for name in (*COREUTILS, "chmod", "rm"):
        path = shutil.which(name)
        assert path is not None
        (tools / name).symlink_to(path)
    (tools / "id").unlink()
    (tools / "id").write_text("#!/bin/sh\necho 0\n")
    (tools / "apt-get").write_text(f'#!/bin/sh\necho "$*" >>{tree}/told\n')
    for name in ("id", "apt-get"):
        (tools / name).chmod(0o755)
    code, lines = setup(tree, PATH=str(tools), KVPLANE_APT="")
    everything = "g++ libxxhash-dev python3 python3-venv python3-dev"
    assert code == 1
    assert lines == [
        f"setup: installing {everything}",
        "setup: no Python 3.11 or newer was found",
    ]
    told = (tree / "told").read_text().splitlines()
    install = f"install -qq -y --no-install-recommends {everything}"
    assert told == ["update -qq", f"{install} --download-only", install]


def make_run(tree: Path) -> subprocess.CompletedProcess[str]:
    """Whatever make has started these tests."""
    command = ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", "run"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)


def test_make_run_ends_with_how_long_it_took(tree: Path) -> None:
    """With a set-up and a demonstration that take a second each."""
    shutil.copy(ROOT / "Makefile", tree)
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nsleep 1; echo "$@"\n')
    script = tree / "scripts" / "setup.sh"
    script.write_text("#!/bin/sh\nsleep 1; echo 17 >.venv/.kvplane-network; echo set up\n")
    for path in (python, script):
        path.chmod(0o755)
    done = make_run(tree)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert (first, second) == ("set up", "-m examples.demo")
    took = re.fullmatch(r"make run: (\d+) s, of which 17 s waited for the network", last)
    assert took is not None and int(took[1]) >= 2
    python.write_text("#!/bin/sh\nexit 3\n")
    done = make_run(tree)
    assert done.returncode != 0
    assert done.stdout == "set up\n"


def test_the_network_is_what_nothing_else_is_done_beside(tree: Path) -> None:
    """Build tools take a second, then packages two, one of them while kernels compile."""
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").touch(0o755)
    fakes = """
install_missing() { network_s=$((network_s + 40)); }
unless_done() { case $1 in build-tools | kernels) sleep 1.1;; packages) sleep 2.2;; esac; }
SECONDS=0
main
"""
    assert call(tree, fakes) == []
    assert 42 <= int((tree / ".venv" / ".kvplane-network").read_text()) <= 43


def call(tree: Path, functions: str, **environ: str) -> list[str]:
    """Return what some of the script's functions print."""
    script = tree / "scripts" / "setup.sh"
    command = ["bash", "-c", script.read_text().removesuffix("\nmain\n") + functions, str(script)]
    environ = {"PATH": os.environ["PATH"], **environ}
    done = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=60)
    return done.stdout.decode().split()


def digests(tree: Path) -> list[str]:
    """Return the digests by which the script knows what has changed, kernels and then blocks."""
    return call(tree, "\nkernels_digest; blocks_digest")


def test_a_change_of_the_blocks_leaves_the_kernels_as_they_are_and_the_other_way_round(
    tree: Path,
) -> None:
    for name in ("bindings.cpp", "blocks/index/hash.cpp", "blocks/core/x.pyc", "blocks/build/log"):
        (tree / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / "csrc" / name).write_text("old")
    kernels, blocks = digests(tree)
    for ignored in ("blocks/core/x.pyc", "blocks/build/log"):
        (tree / "csrc" / ignored).write_text("new")
        assert digests(tree) == [kernels, blocks]
    (tree / "csrc" / "blocks" / "index" / "hash.cpp").write_text("new")
    new_kernels, new_blocks = digests(tree)
    assert new_kernels == kernels and new_blocks != blocks
    (tree / "csrc" / "bindings.cpp").write_text("new")
    newer_kernels, newer_blocks = digests(tree)
    assert newer_kernels != kernels and newer_blocks == new_blocks


def test_cuda_is_for_machines_with_a_gpu_or_for_who_asks(tree: Path) -> None:
    smi = tree / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    path = f"{tree}{os.pathsep}{os.environ['PATH']}"

    def choices(**environ: str) -> list[str]:
        say = '\nchoose_defaults; echo "${KVPLANE_TORCH:-none}" "$KVPLANE_CUDA"'
        return call(tree, say, **{"PATH": path, **environ})

    assert choices() == ["cpu", "OFF"]
    assert choices(KVPLANE_TORCH="cuda", KVPLANE_CUDA="AUTO") == ["cuda", "AUTO"]
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3'\n")
    assert choices() == ["none", "AUTO"]
    assert choices(KVPLANE_TORCH="cpu", KVPLANE_CUDA="OFF") == ["cpu", "OFF"]


def test_an_unknown_build_of_torch_is_refused(tree: Path) -> None:
    code, lines = setup(tree, KVPLANE_TORCH="gpu")
    assert code == 1
    assert lines == ["setup: KVPLANE_TORCH is 'gpu'; it must be cpu or cuda, or not set"]


def test_what_was_asked_for_holds_until_something_else_is_asked_for(tree: Path) -> None:
    for folder in (".venv", "csrc"):
        (tree / folder).mkdir()

    def digests_with(**environ: str) -> list[str]:
        return call(tree, "\nkeep_choices; packages_digest; kernels_digest", **environ)

    plain = digests_with()
    chosen = digests_with(KVPLANE_TORCH="cpu", CUDAARCHS="80-real;90")
    assert plain[0] != chosen[0] and plain[1] != chosen[1]
    assert digests_with() == chosen
    assert digests_with(CUDAARCHS="90-real") == [chosen[0], digests_with()[1]]
    assert digests_with()[1] != chosen[1]
    assert digests_with(KVPLANE_TORCH="", CUDAARCHS="") == plain == digests_with()
