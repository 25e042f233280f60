"""The adapter's rows of what a prefix is found by, with PEFT itself, which no test environment has:
adapter_states.py runs beside it in processes of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_planes import ROOT, Process
from tests.helpers.plane_cache_checks import ATOL
from tests.helpers.programs import printed
from tests.models import model_states as states

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
PACKAGES = ("peft==0.21.2", "accelerate==1.15.0", "psutil==7.2.2")
FOUND = 32  # of 45 tokens, all whole blocks
SAME = {"as the base", "as one alone", "as merged"}  # as what came before


@pytest.fixture(scope="module")
def peft() -> Path:
    """Kept under build/: where PEFT is installed, transformers imports it."""
    folder = ROOT / "build" / "peft"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    if not (folder / "peft").is_dir():
        subprocess.run([*pip, *PACKAGES], check=True, timeout=300)
    return folder


def run(peft: Path, *arguments: str) -> Any:
    command = (sys.executable, "-m", "tests.models.adapter_states", *arguments)
    said = printed(*command, env={"PYTHONPATH": f"{peft}:{ROOT}"}, timeout_s=600)
    return json.loads(said.splitlines()[-1])


def test_one_model_finds_under_its_adapters_what_it_left_under_them(peft: Path) -> None:
    results = run(peft, "one")
    assert [(name, found) for name, _, found, _ in results] == [
        (name, wanted) for name, wanted, _, _ in results
    ]
    assert max(off for *_, off in results) < ATOL


def test_two_processes_share_what_equal_adapters_compute(peft: Path, tmp_path: Path) -> None:
    with (
        Process("control_plane", tmp_path / "control.log") as control,
        states.data_plane(control.address, "weights", tmp_path),
    ):
        first, again = (run(peft, "two", control.address) for _ in range(2))
    assert {name: found for name, found, _ in first} == {
        name: FOUND if name in SAME else 0 for name, _, _ in first
    }
    assert {found for _, found, _ in again} == {FOUND}
    assert max(off for *_, off in first + again) < ATOL


def test_only_the_base_model_is_in_the_namespace_of_a_folders_engines(peft: Path) -> None:
    results = run(peft, "folders")
    assert [name for name, is_engines in results.items() if is_engines] == ["base", "as the base"]


def test_adapters_that_a_pass_chooses_are_refused_by_name(peft: Path) -> None:
    said = run(peft, "refused")
    assert "adapters are chosen for each row" in said["by_row"]
    assert "call unmerge_adapter" in said["merged"]
    assert "prefixes are found by token ids" in said["virtual_tokens"]
