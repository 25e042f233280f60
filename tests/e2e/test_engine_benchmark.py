"""The benchmark of the engine runs, and its sides agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_planes import ROOT


def measured(folder: Path, *flags: str) -> tuple[Any, str]:
    """The JSON and what is printed for a tiny model, batches of two."""
    done = run(folder / "out.json", "--models", "tiny", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text()), done.stdout


def run(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """For batches of two."""
    flags = ("--batches", "2", "--runs", "1", "--quick", *flags)
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", *flags, "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_all_sides_give_the_same_tokens_and_the_figures_are_written(tmp_path: Path) -> None:
    names = ["generate", "generate_batch", "plane_cache", "embedded", "remote"]
    figures, printed = measured(tmp_path, "--threads", "1", "--sides", ",".join(names))
    rows = figures["rows"]
    assert [row["workload"]["name"] for row in rows] == [
        "decode, batch 2",
        "shared prefix, batch 8",
    ]
    for row in rows:
        assert list(row["num_equal"]) == names
        assert 0 < row["service_share"] < 1
        # So few tokens need one plan: none is asked for in a decode step.
        assert all(milliseconds >= 0 for milliseconds in row["step_ms"].values())
        assert all(row["step_ms"][part] > 0 for part in ("model", "kernels", "layer calls", "all"))
        assert set(row["num_equal"].values()) == {1}
        assert all(rate > 0 for rate in row["tokens_per_s"].values())
    assert "embedded / generate:" in printed
    assert printed.count("decode, batch 2") == 1 and "ms of a step: " in printed


@pytest.mark.nightly
def test_each_number_of_threads_is_measured_in_its_turn(tmp_path: Path) -> None:
    figures, _ = measured(tmp_path, "--threads", "1,2", "--sides", "generate")
    assert [row["threads"] for row in figures["rows"]] == [1, 1, 2, 2]


@pytest.mark.nightly
def test_a_run_that_is_cut_off_keeps_its_rows_and_another_adds_to_them(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    cut_off = run(out, "--models", "tiny,unknown", "--threads", "1", "--sides", "generate")
    assert "KeyError: 'unknown'" in cut_off.stderr
    assert len(json.loads(out.read_text())["rows"]) == 2
    assert cut_off.stdout.count("runs with equal tokens") == 2
    figures, _ = measured(tmp_path, "--threads", "2", "--sides", "generate", "--append")
    assert [row["threads"] for row in figures["rows"]] == [1, 1, 2, 2]
