"""The release says which commit a process was built from, where that is known."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplane import __version__, release


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that stands in for the package, in one that stands in for a checkout."""
    folder = tmp_path / "kvplane"
    folder.mkdir()
    monkeypatch.setattr(release, "__file__", str(folder / "release.py"))
    release.release.cache_clear()
    yield folder
    release.release.cache_clear()


def git(folder: Path, *args: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *settings, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_without_a_commit_it_is_the_version_alone(package: Path) -> None:
    assert release.release() == __version__


def test_a_checkout_asks_git(package: Path) -> None:
    git(package.parent, "init", "--quiet")
    assert release.commit() == ""  # nothing is committed yet
    git(package.parent, "commit", "--quiet", "--allow-empty", "--message", "first")
    head = git(package.parent, "rev-parse", "HEAD")
    assert release.release() == f"{__version__}+g{head[:12]}"


def test_what_was_built_says_so_wherever_it_lies(package: Path) -> None:
    git(package.parent, "init", "--quiet")
    git(package.parent, "commit", "--quiet", "--allow-empty", "--message", "somebody's")
    (package / release.COMMIT_FILE).write_text("0123456789ab\n")
    assert release.release() == f"{__version__}+g0123456789ab"


def test_no_git_means_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package.parent / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert release.release() == __version__
