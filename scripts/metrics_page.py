"""Writes docs/metrics.md from the declarations of the planes, the engine and the router.

make metrics-page
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from control_plane.server.metrics import DECLARATIONS as OF_CONTROL
from data_plane.server.metrics import DECLARATIONS as OF_DATA
from engine.serving.metrics import DECLARATIONS as OF_ENGINE
from kvplane.integrations.router.metrics import DECLARATIONS as OF_ROUTER
from kvplane.serving.observability.metrics import SHARED, Declaration

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

`make metrics-page` writes this page from what `kvplane/serving/observability/metrics.py` and the
`metrics.py` of each program declare.

Each plane serves `/metrics` at `--metrics-port` (9101 and 9102 by default), `/healthz` (503 when
the event loop has been stuck for 30 s) and `/ready` (200 while it serves). An engine and a router
serve `/metrics`, `/healthz` and, for readiness, `/health` at their own address. Values are in base
units. All have the usual `process_*` metrics and `kvplane_build_info`.
"""
SECTIONS = (
    ("Of both planes", "On a data plane they have the label `pool` too.", SHARED),
    ("Of the control plane", "", OF_CONTROL),
    ("Of a data plane", "All have the label `pool`.", OF_DATA),
    ("Of an engine", "", OF_ENGINE),
    ("Of the router", "", OF_ROUTER),
)


def page() -> str:
    """Return the page's text."""
    return HEAD + "".join(section(*each) for each in SECTIONS)


def section(title: str, note: str, declarations: Iterable[Declaration]) -> str:
    """Return a heading, a note and a table."""
    rows = [row(declaration) for declaration in sorted(declarations, key=lambda d: d.name)]
    table = "\n".join(["| name | type | labels | what |", "|---|---|---|---|", *rows])
    return "\n".join(["", f"## {title}", "", *([note, ""] if note else []), table, ""])


def row(declaration: Declaration) -> str:
    """Return one line of a table."""
    labels = ", ".join(f"`{label}`" for label in declaration.labels)
    return f"| `{declaration.name}` | {declaration.kind} | {labels} | {declaration.help} |"


if __name__ == "__main__":
    PAGE.write_text(page())
