"""Draws the overview board as it looks under load: docs/board.png, for the README.

    make board

Both planes, Prometheus and a load run for a minute on this machine. The picture shows Prometheus'
answers to the board's own queries, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import cpu_name
from examples.load import Load
from kvplane import ControlClient
from scripts import boards
from tests.helpers.monitored_stack import ROOT, MonitoredStack

PICTURE = ROOT / "docs" / "board.png"
INTERVAL = "5s"
COLUMNS = 4
UNITS = {
    "s": ("ms", 1e-3),
    "Bps": ("GB/s", 1e9),
    "bytes": ("MB", 1e6),
    "percentunit": ("%", 0.01),
    "ops": ("per second", 1.0),
}
POOL = ["--num-device-blocks", "96", "--num-host-blocks", "32"]

Series = tuple[str, list[float], list[float]]


async def record(folder: Path, duration_s: float) -> list[tuple[dict[str, Any], list[Series]]]:
    """Return the panels of the overview, with each query's series after a run."""
    arguments = ["--model", str(ROOT / "models" / "recall"), *POOL]
    with MonitoredStack(folder, [], arguments, with_alertmanager=False) as stack:
        begin_s = time.time()
        async with ControlClient(stack.control) as control:
            engines = [
                Load(duration_s=s, num_sequences=16, num_prefixes=12, pause_s=0.01, seed=seed)
                for seed, s in ((1, duration_s), (2, 0.6 * duration_s))
            ]
            await asyncio.gather(*(engine.run(control, "default") for engine in engines))
        panels = json.loads(boards.files()["overview.json"])["panels"]
        return [(panel, series_of(stack, panel, begin_s, time.time())) for panel in panels]


def series_of(
    stack: MonitoredStack, panel: dict[str, Any], begin_s: float, end_s: float
) -> list[Series]:
    """Return legend, seconds and values of each series of a panel."""
    found: list[Series] = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", INTERVAL).replace("$pool", ".*")
        for series in stack.query_range(expression, begin_s, end_s, step_s=1.0):
            labels = series["metric"]
            legend = target["legendFormat"]
            for name in re.findall(r"{{(\w+)}}", legend):
                legend = legend.replace(f"{{{{{name}}}}}", labels.get(name, ""))
            points = [(at_s - begin_s, float(value)) for at_s, value in series["values"]]
            finite = [(at_s, value) for at_s, value in points if math.isfinite(value)]
            found.append((legend, [p[0] for p in finite], [p[1] for p in finite]))
    return found


def draw(panels: list[tuple[dict[str, Any], list[Series]]]) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = math.ceil(len(panels) / COLUMNS)
    pyplot.style.use("dark_background")
    figure, grid = pyplot.subplots(rows, COLUMNS, figsize=(18, 2.4 * rows), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, (panel, series) in zip(grid.flat, panels, strict=False):
        unit, scale = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], ("", 1.0))
        axes.axis("on")
        axes.set_title(f"{panel['title']}{f', {unit}' if unit else ''}", fontsize=10, loc="left")
        for legend, seconds, values in series:
            axes.plot(seconds, [value / scale for value in values], label=legend, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=6, ncols=2, framealpha=0.3)
    figure.suptitle(
        f"kvplane: overview, measured on {cpu_name()} ({os.cpu_count()} CPUs); x: seconds",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--duration-s", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draw(asyncio.run(record(Path(folder), options.duration_s)))
    sys.stdout.write(f"{PICTURE}\n")
