"""Rows of figures, their goals, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.common.report import markdown
from benchmarks.common.timing import quantile

MICROSECONDS: Final = "us"
STEPS_PER_S: Final = "steps/s"
# Units where a higher figure is better.
_RATES: Final = {STEPS_PER_S}

# Goals for the median, by the row's name.
GOALS: Final = {
    "core/hit_in_use_32k": 150.0,
    "core/miss_32k": 200.0,
    "core/hit_free_32k_pool100k": 150.0,
    "core/decode_step_256": 40.0,
    "core/rebuild_1M_blocks": 1e6,
    "core/rebuild_1M_blocks/longest_call": 10_000.0,
    "core/resume_1M_blocks/longest_call": 10_000.0,
    "core/abort_256x2048/abort": 5_000.0,
    "core/abort_256x2048/next_step": 5_000.0,
    "grpc/abort_256x2048/abort": 5_000.0,
    "grpc/abort_256x2048/next_step": 5_000.0,
    "grpc/hit_in_use_32k": 1_000.0,
    "grpc/miss_32k": 1_000.0,
    "grpc/hit_free_32k_pool100k": 1_000.0,
    "grpc/decode_step_256": 400.0,
    "grpc/rebuild_1M_blocks": 1e6,
    "grpc/rebuild_1M_blocks/longest_wait": 10_000.0,
    "grpc/resume_1M_blocks/longest_wait": 10_000.0,
    "grpc/steps_per_s_1_engine": 5_000.0,
    "grpc/steps_per_s_8_engines": 5_000.0,
    "grpc/steps_per_s_64_engines": 5_000.0,
}
_SLICES: Final = "core/slices/"
_SLICE_US: Final = 10_000.0
_GRPC_P99_US: Final = 5_000.0
GOALS_P99: Final = {
    f"grpc/{case}": _GRPC_P99_US
    for case in (
        "hit_in_use_32k",
        "miss_32k",
        "hit_free_32k_pool100k",
        "decode_step_256",
        "steps_per_s_1_engine/latency",
        "steps_per_s_8_engines/latency",
        "decode_beside_32k_admissions",
    )
}


@dataclass(frozen=True)
class Row:
    """One figure. ``p99``: 99 % of the samples are as good. ``name`` is without the world's."""

    name: str
    unit: str
    p50: float
    p99: float
    num_samples: int

    @classmethod
    def of_seconds(cls, name: str, seconds: Sequence[float], unit: str = MICROSECONDS) -> Row:
        """Return a row of latencies, in microseconds."""
        p50, p99 = (1e6 * quantile(seconds, q) for q in (0.5, 0.99))
        return cls(name, unit, p50, p99, len(seconds))

    @classmethod
    def of_one(cls, name: str, unit: str, value: float) -> Row:
        """Return a row of a figure that was measured once."""
        return cls(name, unit, value, value, 1)


def as_json(world: str, rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows of one case in one world, for programs."""
    entries = []
    for row in rows:
        name = f"{world}/{row.name}"
        entry: dict[str, object] = {
            "name": name,
            "unit": row.unit,
            "p50": round(row.p50, 2),
            "p99": round(row.p99, 2),
            "num_samples": row.num_samples,
        }
        if (goal := goal_of(name)) is not None:
            entry["goal"] = goal
        if name in GOALS_P99:
            entry["goal_p99"] = GOALS_P99[name]
        entries.append(entry)
    return entries


def goal_of(name: str) -> float | None:
    """Return the goal for a row's median. That of each row of slices is the same: nothing holds the
    event loop for longer.
    """
    return GOALS.get(name, _SLICE_US if name.startswith(_SLICES) else None)


def best_of(rounds: Sequence[Sequence[dict[str, object]]]) -> list[dict[str, object]]:
    """Return for each name the row, of ``as_json``'s, of the round with the best ``p50``.
    With several rounds it also has ``median_p50``, the median of all of them.
    """
    by_name: dict[str, list[dict[str, object]]] = {}
    for row in (row for rows in rounds for row in rows):
        by_name.setdefault(str(row["name"]), []).append(row)
    best = []
    for rows in by_name.values():
        rows.sort(key=lambda row: float(str(row["p50"])), reverse=rows[0]["unit"] in _RATES)
        best.append(rows[0])
        if len(rounds) > 1:
            median = statistics.median(float(str(row["p50"])) for row in rows)
            best[-1] = {**rows[0], "num_rounds": len(rows), "median_p50": round(median, 2)}
    return best


def table(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    """Yield rows of ``as_json`` as lines, with goals beside the figures."""
    heads = ["", "unit", "p50", "goal", "p99", "goal"]
    if any("median_p50" in row for row in rows):
        heads.append("median of rounds")

    def cells(row: dict[str, object]) -> list[str]:
        return [
            str(row["name"]),
            str(row["unit"]),
            _number(row["p50"]),
            _goal(row, "p50", "goal"),
            _number(row["p99"]),
            _goal(row, "p99", "goal_p99"),
            *([_number(row["median_p50"])] if "median_p50" in row else []),
        ]

    return markdown(heads, map(cells, rows))


def _goal(row: dict[str, object], figure: str, goal: str) -> str:
    if goal not in row:
        return ""
    is_rate = row["unit"] in _RATES
    value, wanted = float(str(row[figure])), float(str(row[goal]))
    is_met = value >= wanted if is_rate else value <= wanted
    sign = "≥" if is_rate else "≤"
    return f"{sign} {_number(wanted)} {'met' if is_met else 'missed'}"


def _number(value: object) -> str:
    number = float(str(value))
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"
