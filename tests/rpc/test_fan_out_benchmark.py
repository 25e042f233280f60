"""The benchmark of pools of several shards runs, and prints a line for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_prints_a_line_for_each_number_of_shards() -> None:
    command = [sys.executable, "-m", "benchmarks.fan_out", "--shards", "1", "2", "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["1", "2"]
