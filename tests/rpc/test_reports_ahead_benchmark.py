"""The benchmark of reports ahead runs, and what it prints is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = ("all", "equal", "1 % of the ranges", "1 % of the blocks")


@pytest.mark.nightly
def test_what_is_equal_is_not_sent() -> None:
    command = [sys.executable, "-m", "benchmarks.reports_ahead", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, check=True, timeout=100, capture_output=True, text=True
    )
    rows = done.stdout.splitlines()[3:]
    wanted = [f"{world} {case} " for case in CASES for world in ("core", "grpc")]
    assert len(rows) == len(wanted)
    assert all(row.startswith(start) for row, start in zip(rows, wanted, strict=True))
    lines = [row.split() for row in rows]
    restored = [line[-1] for line in lines]
    assert restored[0::2] == restored[1::2], "in process and over gRPC"
    assert restored[0] == restored[2] == "1,281"
    megabytes = [float(line[-3]) for line in lines]
    assert megabytes[0] == megabytes[1] > 0.1 > megabytes[2] == megabytes[3]
