"""The benchmark of the engine runs, and its sides agree."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.programs import run


def test_all_sides_give_the_same_tokens_and_the_figures_are_written(tmp_path: Path) -> None:
    names = ["generate", "generate_batch", "embedded", "remote"]
    out = tmp_path / "out.json"
    flags = ["--models", "tiny", "--batches", "2", "--runs", "1", "--quick", "--threads", "1"]
    flags += ["--sides", ",".join(names)]
    done = run("benchmarks.engine", *flags, "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows, printed = json.loads(out.read_text())["rows"], done.stdout
    assert [row["workload"]["name"] for row in rows] == [
        "decode, batch 2",
        "shared prefix, batch 8",
    ]
    for row in rows:
        assert list(row["num_equal"]) == names
        assert set(row["num_equal"].values()) == {1}
        assert all(rate > 0 for rate in row["tokens_per_s"].values())
    assert "embedded / generate:" in printed
    assert printed.count("decode, batch 2") == 1
