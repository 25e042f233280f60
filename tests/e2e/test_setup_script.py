"""What ``make`` says when the machine lacks something: one line, before anything is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COREUTILS = ("bash", "cat", "cut", "dirname", "env", "find", "grep", "sha256sum", "sort", "xargs")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As much of a fresh clone as the script looks at before it installs."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def setup(tree: Path, **environ: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        ["scripts/setup.sh"],
        cwd=tree,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (tree / ".venv").exists()
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_without_a_compiler_it_names_the_package_to_install(tree: Path) -> None:
    code, lines = setup(tree, CXX="no-such-compiler")
    assert code == 1
    assert lines == ["setup: a C++17 compiler is needed (on Debian: apt install g++)"]


def test_without_the_header_of_xxhash_it_names_the_package_to_install(tree: Path) -> None:
    compiler = tree / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ -nostdinc "$@"\n')  # finds no header at all
    compiler.chmod(0o755)
    code, lines = setup(tree, CXX=str(compiler))
    assert code == 1
    assert lines == ["setup: xxhash.h is needed (on Debian: apt install libxxhash-dev)"]


def test_without_a_new_enough_python_it_names_the_packages_to_install(tree: Path) -> None:
    needed = "Python 3.11 or newer is needed (on Debian: apt install python3 python3-venv"
    assert setup(tree, PYTHON="no-such-python") == (1, [f"setup: {needed} python3-dev)"])

    old = tree / "old"
    old.write_text("#!/bin/sh\nexit 1\n")  # what a Python 3.10 answers to the version check
    old.chmod(0o755)
    assert setup(tree, PYTHON=str(old)) == (1, [f"setup: {needed} python3-dev)"])


def test_on_a_machine_with_no_python_at_all_it_says_so(tree: Path) -> None:
    tools = tree / "bin"
    tools.mkdir()
    for name in COREUTILS:
        path = shutil.which(name)
        assert path is not None
        (tools / name).symlink_to(path)
    code, lines = setup(tree, PATH=str(tools))
    assert code == 1
    assert len(lines) == 1
    assert "Python 3.11 or newer is needed" in lines[0]


def call(tree: Path, functions: str, **environ: str) -> list[str]:
    """What some of the script's functions print."""
    script = tree / "scripts" / "setup.sh"
    command = ["bash", "-c", script.read_text().removesuffix("\nmain\n") + functions, str(script)]
    environ = {"PATH": os.environ["PATH"], **environ}
    done = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=60)
    return done.stdout.decode().split()


def digests(tree: Path) -> list[str]:
    """What the script compares to know whether the kernels, or the blocks, have changed."""
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


def test_an_unknown_build_of_torch_is_refused(tree: Path) -> None:
    code, lines = setup(tree, KVPLANE_TORCH="gpu")
    assert code == 1
    assert lines == ["setup: KVPLANE_TORCH is 'gpu'; it must be cpu, or not set"]


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
