"""Writes docs/reference/metrics.md from the declarations of both planes and of the router.

make metrics-page
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from control_plane.server.metrics import DECLARATIONS as OF_CONTROL
from data_plane.server.metrics import DECLARATIONS as OF_DATA
from kvplane.integrations.router.metrics import DECLARATIONS as OF_ROUTER
from kvplane.serving.observability.metrics import SHARED, Declaration

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "metrics.md"
HEAD = """# Metrics

`make metrics-page` writes this page from the declarations in
`kvplane/serving/observability/metrics.py`, `control_plane/server/metrics.py`,
`data_plane/server/metrics.py` and `integrations/router/metrics.py`.

Each plane serves `/metrics` (`--metrics-port`; 9101 and 9102 by default), and `/healthz`, which
answers 200 while it serves; the router serves both at the address of its proxy. Values are in base
units. Both planes also have the usual `process_*` metrics. Rules and alerts made of them are in
`deploy/prometheus/`.
"""
ROUTER = "Of the router"
SECTIONS = (
    ("Of both planes", "On a data plane they have the label `pool` too.", SHARED),
    ("Of the control plane", "", OF_CONTROL),
    ("Of a data plane", "All have the label `pool`.", OF_DATA),
    (ROUTER, "", OF_ROUTER),
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
