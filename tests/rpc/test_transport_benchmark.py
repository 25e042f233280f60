"""The benchmarks of a layer's transports and of several shards run, and print their lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str) -> list[str]:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.nightly
def test_each_side_has_a_row_in_each_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lines = run("benchmarks.transport", "--steps", "10", "--batches", "2", "--json", str(out))
    rows = json.loads(out.read_text())["rows"]
    sides = ["embedded", "shared memory", "grpc", "grpc, waiting"]
    assert [row["side"] for row in rows] == sides * 4 and len(lines) == 1 + len(rows)
    assert all(row["layer_p50"] > 0 and row["step_p50"] > 0 for row in rows)


@pytest.mark.nightly
def test_it_prints_a_line_for_each_number_of_shards() -> None:
    lines = run("benchmarks.transport.shards", "--shards", "1", "2", "--steps", "3")
    assert [line.split()[0] for line in lines[2:]] == ["1", "2"]
