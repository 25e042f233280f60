"""The benchmarks run all their cases, and write what programs read; the engine's sides agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane.report import GOALS, GOALS_P99, goal_of
from tests.helpers import programs
from tests.helpers.programs import printed

# The control plane.

PROMPTS = ("hit_in_use_32k", "miss_32k", "hit_free_32k_pool100k")
STEPS = ("empty_step", "decode_step_256")
MOVES = (
    *("swap_2048_blocks/out", "swap_2048_blocks/in"),
    *("abort_256x2048/abort", "abort_256x2048/next_step"),
)
RATES = ("steps_per_s_1_engine", "steps_per_s_8_engines", "steps_per_s_64_engines")
REPORTS = ("rebuild_1M_blocks", "resume_1M_blocks")
UNITS = {"us", "steps/s", "bytes"}


def run(out: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a quick run."""
    command = [sys.executable, "-m", "benchmarks.control_plane", "--quick", "--json", str(out)]
    said = printed(*command, *flags, timeout_s=100)
    return json.loads(out.read_text()), said


def check(written: dict[str, Any], printed: str) -> dict[str, Any]:
    """Return the rows by name."""
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    assert set(written["machine"]) >= {"cpu", "cpu_count", "python"}
    for name, row in rows.items():
        assert row["unit"] in UNITS
        assert row["p50"] > 0
        assert row["p99"] > 0 or row["unit"] == "steps/s"  # a window may hold no step
        assert row["num_samples"] > 0
        assert row.get("goal") == goal_of(name)
        assert row.get("goal_p99") == GOALS_P99.get(name)
        assert name in printed
    return rows


def test_a_case_is_measured_in_process_and_over_grpc(tmp_path: Path) -> None:
    rows = check(*run(tmp_path / "out.json", "--only", "/decode_step_256$"))
    assert rows.keys() == {"core/decode_step_256", "grpc/decode_step_256"}


@pytest.mark.nightly  # takes half a minute
def test_every_case_gives_a_row_and_every_goal_belongs_to_one(tmp_path: Path) -> None:
    rows = check(*run(tmp_path / "out.json"))
    for case in (*PROMPTS, *STEPS, *MOVES, *RATES, *REPORTS):
        assert {f"core/{case}", f"grpc/{case}"} <= rows.keys()
    assert rows.keys() >= GOALS.keys() | GOALS_P99.keys()


@pytest.mark.nightly  # measures at full size, for a minute
def test_no_slice_holds_the_event_loop_for_long(tmp_path: Path) -> None:
    """With the sizes of the measurements, as far as one message of the default size goes."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.control_plane", "--json", str(out)]
    command += ["--rounds", "2", "--only", "core/(slices|rebuild_1M_blocks)"]
    printed(*command, timeout_s=300)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    held = {name for name in rows if "slices/" in name or name.endswith("/longest_call")}
    assert held >= {"core/resume_1M_blocks/longest_call", "core/slices/swap_100x2048/out"}
    of_larger_messages = {name for name in held if "compute_256x" in name}
    for name in held - of_larger_messages:
        assert rows[name]["p50"] <= 10_000.0, name


# The engine.


@pytest.mark.nightly  # three engines
def test_all_sides_give_the_same_tokens_and_the_figures_are_written(tmp_path: Path) -> None:
    names = ["generate", "embedded", "remote"]
    out = tmp_path / "out.json"
    flags = ["--models", "tiny", "--batches", "2", "--runs", "1", "--quick", "--threads", "1"]
    flags += ["--sides", ",".join(names)]
    done = programs.run("benchmarks.engine", *flags, "--json", str(out))
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


# A layer's transports.


@pytest.mark.nightly
def test_each_transport_has_a_row_in_each_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.transport", "--steps", "10", "--batches", "2"]
    command += ["--json", str(out)]
    lines = printed(*command, timeout_s=100).splitlines()
    rows = json.loads(out.read_text())["rows"]
    sides = ["embedded", "shared memory", "grpc"]
    assert [row["side"] for row in rows] == sides * 4 and len(lines) == 1 + len(rows)
    assert all(row["layer_p50"] > 0 and row["step_p50"] > 0 for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize(("flags", "rows"), [((), 6), (("--remote",), 12)])
def test_chunks_are_stored_and_loaded(flags: tuple[str, ...], rows: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.blocks", "--turns", "1", "--json", str(out)]
    said = printed(*command, *flags, timeout_s=100)
    assert said.count("\n| 64 KiB") + said.count("\n| 2048 KiB") == rows
    assert json.loads(out.read_text())["chunks"] == 12
