"""Prints the figures of ``benchmarks.engine --json FILE`` as tables of Markdown.

python -m benchmarks.engine.table FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def tables(figures: dict[str, Any]) -> str:
    """Return tokens a second by side with the goals, and the parts of a decode step."""
    rows = figures["rows"]
    sides = list(rows[0]["tokens_per_s"])
    whats = list(dict.fromkeys(goal["what"] for row in rows for goal in row["goals"]))
    lines = [
        f"| tokens/s | {' | '.join(sides)} | {' | '.join(whats)} | service's share |",
        "|---" * (len(sides) + len(whats) + 2) + "|",
    ]
    for row in rows:
        rates = [f"{row['tokens_per_s'][side]:,.1f}" for side in sides]
        goals = {g["what"]: f"{g['ratio']:.2f} (≥ {g['goal']:.1f})" for g in row["goals"]}
        share = f"{row['service_share']:.1%}"
        if row["service_share_goal"] is not None:
            share += f" (≤ {row['service_share_goal']:.0%})"
        cells = [*rates, *(goals.get(what, "") for what in whats), share]
        lines.append(f"| {name_of(row)} | {' | '.join(cells)} |")
    parts = list(rows[0]["step_ms"])
    lines += ["", f"| ms of a decode step | {' | '.join(parts)} |", "|---" * (len(parts) + 1) + "|"]
    for row in rows:
        cells = [f"{row['step_ms'][part]:.2f}" for part in parts]
        lines.append(f"| {name_of(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def name_of(row: dict[str, Any]) -> str:
    """Return the first cell of a row."""
    threads = f", {row['threads']} threads" if "threads" in row else ""  # older files have none
    return f"{row['model']}{threads}, {row['workload']['name']}"


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
