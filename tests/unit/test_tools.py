"""A test that needs a program which is not there is skipped, and says how to install it."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import SkipTest

import pytest

from tests.helpers.programs import called
from tests.helpers.tools import needs

ROOT = Path(__file__).resolve().parent.parent.parent


def test_what_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("promtool", "prometheus"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KVPLANE_TESTS", "")
    needs("promtool", "prometheus")
    with pytest.raises(SkipTest, match=r"^needs: apt install etcd-client etcd-server$"):
        needs("etcdctl", "etcd", "promtool")
    monkeypatch.setenv("KVPLANE_TESTS", "strict")
    with pytest.raises(AssertionError, match="apt install chromium"):
        needs("chromium")


@pytest.mark.parametrize("is_strict", [False, True])
def test_the_last_lines_count_what_was_skipped(tmp_path: Path, is_strict: bool) -> None:
    """In a run of its own on two tests, one of which needs two programs."""
    (tmp_path / "conftest.py").symlink_to(ROOT / "conftest.py")
    test = "from tests.helpers.tools import needs\n"
    test += "def test_a(): needs('chromium', 'go')\ndef test_b(): pass\n"
    (tmp_path / "test_few.py").write_text(test)
    env = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env["KVPLANE_TESTS"] = "strict" if is_strict else ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = called(*command, cwd=tmp_path, env=env, timeout_s=120)
    assert done.returncode == is_strict, done.stdout + done.stderr
    if is_strict:
        assert "1 failed, 1 passed" in done.stdout
    else:
        assert "1 passed, 1 skipped" in done.stdout
        line = "tests skipped for want of programs: 1; apt install chromium golang-go"
        assert line in done.stdout
