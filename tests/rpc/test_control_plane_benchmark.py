"""The benchmark of the control plane runs all its cases, and writes what programs read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane import report
from benchmarks.control_plane.report import (
    GOALS,
    GOALS_P99,
    Outcome,
    Row,
    best_of,
    goal_of,
    table,
)

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ("hit_in_use_32k", "miss_32k", "hit_free_32k_pool100k")
OTHERS = ("empty_step", "decode_step_256", "fork_2048_blocks", "swap_2048_blocks", "abort_256x2048")
RATES = ("steps_per_s_1_engine", "steps_per_s_8_engines", "steps_per_s_64_engines")
REPORTS = ("rebuild_1M_blocks", "resume_1M_blocks")
UNITS = {"us", "steps/s", "ns/block", "looks/block", "bytes", "x"}


def run(out: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a quick run."""
    command = [sys.executable, "-m", "benchmarks.control_plane", "--quick", "--json", str(out)]
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, check=True, timeout=100, capture_output=True, text=True
    )
    return json.loads(out.read_text()), done.stdout


def test_every_case_gives_a_row_and_every_goal_belongs_to_one(tmp_path: Path) -> None:
    written, printed = run(tmp_path / "out.json")
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    assert set(written["machine"]) >= {"cpu", "cpu_count", "python", "gc"}
    assert written["machine"]["gc"] == "on"
    for case in (*PROMPTS, *OTHERS, *RATES, *REPORTS):
        assert {f"core/{case}", f"grpc/{case}"} <= rows.keys()
    assert rows.keys() >= GOALS.keys() | GOALS_P99.keys()
    for name, row in rows.items():
        assert row["unit"] in UNITS
        assert row["p50"] > 0
        assert row["p99"] > 0 or row["unit"] == "steps/s"  # a window may hold no step
        assert row["num_samples"] > 0
        assert row.get("goal") == goal_of(name)
        assert row.get("goal_p99") == GOALS_P99.get(name)
        assert f"\n{name} " in printed
    assert rows["grpc/steps_per_s_64_engines_paced"]["p50"] < 5_500


def test_no_slice_holds_the_event_loop_for_long(tmp_path: Path) -> None:
    """With the sizes of the measurements, as far as one message of the default size goes."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.control_plane", "--json", str(out)]
    flags = ("--rounds", "2", "--only", "core/(slices|rebuild_1M_blocks)")
    subprocess.run([*command, *flags], cwd=ROOT, check=True, timeout=300, capture_output=True)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    held = {name for name in rows if "slices/" in name or name.endswith("/longest_call")}
    assert held >= {"core/resume_1M_blocks/longest_call", "core/slices/swap_100x2048/out"}
    of_larger_messages = {name for name in held if "compute_256x" in name}
    for name in held - of_larger_messages:
        assert rows[name]["p50"] <= 10_000.0, name


@pytest.mark.parametrize("world", ["core", "grpc"])
def test_a_pattern_picks_cases_and_the_garbage_collector_can_be_off(
    world: str, tmp_path: Path
) -> None:
    flags = ("--no-gc", "--rounds", "2", "--only", f"{world}/fork")
    written, printed = run(tmp_path / "out.json", *flags)
    assert [row["name"] for row in written["rows"]] == [f"{world}/fork_2048_blocks"]
    assert written["machine"]["gc"] == "off"
    assert written["rows"][0]["num_gc_pauses"] == 0
    assert written["rows"][0]["num_rounds"] == 2
    assert printed.count(f"\n{world}/fork_2048_blocks ") == 1  # a line for both


def test_a_goal_of_a_rate_is_a_least_value_and_of_a_latency_a_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goals = {"core/step": 10.0, "core/slow": 10.0, "core/rate": 10.0, "core/low": 10.0}
    monkeypatch.setattr(report, "GOALS", goals)
    rows = [
        Row("step", "us", 9, 99, 1),
        Row("slow", "us", 11, 99, 1),
        Row("rate", "steps/s", 11, 5, 1),
        Row("low", "steps/s", 9, 5, 1),
    ]
    lines = table(Outcome("core", rows, gc_s=[0.5, 0.25]).as_json()).splitlines()[1:]
    assert [line.split()[5] for line in lines] == ["met", "missed", "met", "missed"]
    assert all(line.endswith("500,000") for line in lines)


def test_of_rounds_the_one_with_the_best_median_is_given_and_the_median_of_all() -> None:
    rounds = [
        Outcome("core", [Row("step", "us", p50, 9, 1), Row("rate", "steps/s", p50, 1, 1)]).as_json()
        for p50 in (30.0, 10.0, 14.0)
    ]
    step, rate = best_of(rounds)
    assert (step["p50"], step["median_p50"], step["num_rounds"]) == (10, 14, 3)
    assert (rate["p50"], rate["median_p50"], rate["num_rounds"]) == (30, 14, 3)
    head, *lines = table([step, rate]).splitlines()
    assert head.endswith("median of rounds")
    assert [line.split()[-1] for line in lines] == ["14", "14"]
    assert best_of(rounds[:1]) == rounds[0]
