"""Describes the machine that a measurement ran on, and saves its figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(**settings: object) -> dict[str, object]:
    """Return the machine, its present load, and the settings of a run."""
    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **settings,
    }


def said(described: Mapping[str, object]) -> str:
    """Return a line with what ``machine`` describes."""
    return ", ".join(f"{name} {value}" for name, value in described.items())


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def save(path: Path | None, record: object) -> None:
    """Write figures as JSON, whole or not at all; do nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)
