"""The script that says whether a tree and its wheels are the release of a tag."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.helpers.programs import called

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAMES_IT = ("csrc/blocks/pyproject.toml", ".env", "deploy/kubernetes/fleet/kustomization.yaml")
CHANGES = f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-11-30\n\nNews.\n\n## [0.0.1]\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a folder with what the script reads; of the wheels only the names count."""
    for path in ("pyproject.toml", "csrc/pyproject.toml", "scripts/release.sh", *NAMES_IT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for path in (ROOT / "deploy/kubernetes").glob("*/kustomization.yaml"):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    (tmp_path / "dist").mkdir()
    for name in ("kvplane", "kvplane_blocks", "kvplane_kernels"):
        (tmp_path / "dist" / f"{name}-{VERSION}-py3-none-any.whl").write_bytes(name.encode())
    return tmp_path


def release(tree: Path, tag: str = f"v{VERSION}") -> subprocess.CompletedProcess[str]:
    return called("scripts/release.sh", tag, cwd=tree, timeout_s=60)


def test_it_prints_files_with_checksums_and_the_section_of_the_changelog(tree: Path) -> None:
    done = release(tree)
    assert done.returncode == 0, done.stderr
    sums = (tree / "dist/SHA256SUMS").read_text()
    assert f"{hashlib.sha256(b'kvplane').hexdigest()}  ./kvplane-{VERSION}" in sums
    assert (len(sums.splitlines()), (tree / "dist/NOTES.md").read_text()) == (3, "\nNews.\n")
    assert done.stdout == f"{sums}\nNews.\n"


def test_the_changelog_of_this_tree_has_a_section_of_its_version(tree: Path) -> None:
    shutil.copy(ROOT / "CHANGELOG.md", tree)
    assert release(tree).returncode == 0


@pytest.mark.parametrize("path", NAMES_IT)
def test_a_file_that_names_another_version_is_named(tree: Path, path: str) -> None:
    file = tree / path
    file.write_text(file.read_text().replace(VERSION, f"{VERSION}1", 1))
    done = release(tree)
    assert (done.returncode, f"{path}:" in done.stderr) == (1, True), done.stderr


def test_another_tag_is_refused(tree: Path) -> None:
    for tag in ("v9.9.9", VERSION, f"v{VERSION.replace('.', '0')}"):
        assert release(tree, tag).returncode == 1


def test_a_release_without_its_section_or_with_an_undated_one_is_refused(tree: Path) -> None:
    changelog = tree / "CHANGELOG.md"
    for text in (CHANGES.replace(" - 2026-11-30", ""), CHANGES.replace("News.\n", "")):
        changelog.write_text(text)
        done = release(tree)
        assert (done.returncode, "no dated section" in done.stderr) == (1, True)


def test_a_wheel_that_is_missing_is_named(tree: Path) -> None:
    next((tree / "dist").glob("kvplane_blocks*")).unlink()
    done = release(tree)
    assert (done.returncode, "kvplane_blocks" in done.stderr) == (1, True)
