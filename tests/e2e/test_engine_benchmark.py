"""The benchmark of the engine runs, and its sides agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from engine_planes import ROOT

from benchmarks.engine.table import tables


def test_all_sides_give_the_same_tokens_and_the_figures_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--models", "tiny", "--batches", "2", "--threads", "1", "--runs", "1", "--quick"]
    names = ["generate", "generate_batch", "plane_cache", "embedded", "remote"]
    flags += ["--sides", ",".join(names)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", *flags, "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["workload"]["name"] for row in rows] == [
        "decode, batch 2",
        "shared prefix, batch 8",
    ]
    for row in rows:
        assert list(row["num_equal"]) == names
        assert 0 < row["service_share"] < 1
        assert all(milliseconds > 0 for milliseconds in row["step_ms"].values())
        assert set(row["num_equal"].values()) == {1}
        assert all(rate > 0 for rate in row["tokens_per_s"].values())
    assert "embedded / generate:" in done.stdout
    lines = tables(json.loads(out.read_text())).splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert sum("decode, batch 2" in line for line in lines) == 2
