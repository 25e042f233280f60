"""Runs one kernel under Nsight Compute, and prints its figures in a few lines.

    python -m benchmarks.gpu.profile metrics       the names of the figures, for ncu
    python -m benchmarks.gpu.profile kernel NAME   the kernel that does the work, for ncu
    python -m benchmarks.gpu.profile run NAME      the program to profile; needs a GPU
    python -m benchmarks.gpu.profile say NCU.csv   the figures, from `ncu --csv --page raw`

NAME: decode, speculative or prefill.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

SHAPES: Final = {
    "decode": [(1, 4096)] * 16,
    "speculative": [(4, 4 + 4096)] * 16,
    "prefill": [(4096, 4096)],
}
"""New tokens and context of each sequence."""
KERNELS: Final = {"decode": "attend_short", "speculative": "attend_short", "prefill": "attend_long"}
"""The kernel that attends to a shape's rows. The call launches others too, some with no work."""
METRICS: Final = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stall memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stall barrier",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": "stall shared",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank conflicts",
}


def run(name: str) -> None:
    """Call the kernels twice: the first call warms up."""
    import torch

    from benchmarks.gpu.case import Case

    case = Case(SHAPES[name])
    plan = case.plan()
    for _ in range(2):
        case.attend(plan)
    torch.cuda.synchronize()


def lines(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Return a line for each profiled kernel; the first row of ncu's table holds the units."""
    for row in rows:
        name = row.get("Kernel Name", "").partition("(")[0].removeprefix("void ")
        kernel = re.sub(r"\w+::", "", name)
        figures = [f"{said} {row[name]}" for name, said in METRICS.items() if row.get(name)]
        if kernel and figures:
            yield f"profile: {kernel[:60]}: {', '.join(figures)}"


def say(path: Path) -> list[str]:
    """Return the lines of a file, without the output of ncu and the program before the table."""
    text = path.read_text().splitlines()
    first = next((i for i, line in enumerate(text) if line.startswith('"ID"')), len(text))
    return list(lines(list(csv.DictReader(text[first:]))))


def main(words: Sequence[str]) -> int:
    """Run a command; return 0, or 2 for unknown words."""
    if len(words) == 2 and words[0] == "run" and words[1] in SHAPES:
        run(words[1])
    elif len(words) == 2 and words[0] == "say":
        print("\n".join(say(Path(words[1]))))
    elif len(words) == 2 and words[0] == "kernel" and words[1] in KERNELS:
        print(KERNELS[words[1]])
    elif words == ["metrics"]:
        print(",".join(METRICS))
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
