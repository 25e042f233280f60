"""Rows of figures, their goals, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
    """One figure. ``p99``: 99 % of the samples are as good. ``median_p50``: of all rounds."""

    name: str
    unit: str
    p50: float
    p99: float
    num_samples: int
    median_p50: float | None = None

    @classmethod
    def of_seconds(cls, name: str, seconds: Sequence[float]) -> Row:
        """Return a row of latencies, in microseconds."""
        p50, p99 = (1e6 * quantile(seconds, q) for q in (0.5, 0.99))
        return cls(name, MICROSECONDS, p50, p99, len(seconds))

    @classmethod
    def of_one(cls, name: str, unit: str, value: float) -> Row:
        """Return a row of a figure that was measured once."""
        return cls(name, unit, value, value, 1)


def as_json(row: Row) -> dict[str, object]:
    """Return a row for programs, with its goals."""
    goals = {"goal": goal_of(row.name), "goal_p99": GOALS_P99.get(row.name)}
    entry = {**asdict(row), "p50": round(row.p50, 2), "p99": round(row.p99, 2), **goals}
    return {name: value for name, value in entry.items() if value is not None}


def goal_of(name: str) -> float | None:
    """Return the goal for a row's median. That of each row of slices is the same: nothing holds the
    event loop for longer.
    """
    return GOALS.get(name, _SLICE_US if name.startswith(_SLICES) else None)


def best_of(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return for each name the row of the round with the best ``p50``, and, with several rounds,
    with the median of all rounds' in it.
    """
    by_name: dict[str, list[Row]] = {}
    for row in (row for rows in rounds for row in rows):
        by_name.setdefault(row.name, []).append(row)
    best = []
    for rows in by_name.values():
        rows.sort(key=lambda row: row.p50, reverse=rows[0].unit in _RATES)
        median = statistics.median(row.p50 for row in rows)
        best.append(replace(rows[0], median_p50=median) if len(rounds) > 1 else rows[0])
    return best


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield rows as lines, with goals beside the figures."""
    heads = ("", "unit", "p50", "goal", "p99", "goal", "median of rounds")

    def cells(row: Row) -> list[str]:
        return [
            row.name,
            row.unit,
            _number(row.p50),
            _goal(row, row.p50, goal_of(row.name)),
            _number(row.p99),
            _goal(row, row.p99, GOALS_P99.get(row.name)),
            "" if row.median_p50 is None else _number(row.median_p50),
        ]

    return markdown(heads, map(cells, rows))


def _goal(row: Row, value: float, wanted: float | None) -> str:
    if wanted is None:
        return ""
    is_rate = row.unit in _RATES
    is_met = value >= wanted if is_rate else value <= wanted
    sign = "≥" if is_rate else "≤"
    return f"{sign} {_number(wanted)} {'met' if is_met else 'missed'}"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"
