"""The benchmark of a layer's transports runs, and prints its lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_each_side_has_a_row_in_each_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.transport", "--steps", "10", "--batches", "2"]
    command += ["--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = json.loads(out.read_text())["rows"]
    sides = ["embedded", "shared memory", "grpc"]
    assert [row["side"] for row in rows] == sides * 4 and len(lines) == 1 + len(rows)
    assert all(row["layer_p50"] > 0 and row["step_p50"] > 0 for row in rows)
