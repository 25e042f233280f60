"""The benchmark of pushes runs, and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_it_measures_each_way(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "integrations.push.benchmarks", "--mebibytes", "1"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(out.read_text())["gb_per_s"]
    assert list(rates) == ["raw TCP", "plain gRPC", "pushed", "by a client"]
    assert all(len(values) == 1 and values[0] > 0 for values in rates.values())
