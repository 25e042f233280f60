"""Writes the tables of docs/reference/ from what declares their contents: ``make reference``.

The first paragraphs of each page stay as they are. tests/unit/test_reference.py compares.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Final

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.metrics import DECLARATIONS as OF_CONTROL
from data_plane.server.config import DataPlaneSettings
from data_plane.server.metrics import DECLARATIONS as OF_DATA
from engine.config import GenerateSettings, PrintLayoutSettings
from engine.serving.config import ServeSettings
from engine.serving.metrics import DECLARATIONS as OF_ENGINE
from kvplane.cli.up import UpSettings
from kvplane.errors import CODES, reason_of
from kvplane.integrations.events.config import EventsSettings
from kvplane.integrations.push.metrics import DECLARATIONS as OF_PUSHES
from kvplane.integrations.router.config import RouterSettings
from kvplane.integrations.router.metrics import DECLARATIONS as OF_ROUTER
from kvplane.serving.observability.metrics import SHARED, Declaration
from kvplane.serving.settings import parse

FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"
ENGINE, ROUTER, PUSHES = "Of an engine", "Of the router", "Of pushes, on a data plane"
SECTIONS: Final = (
    ("Of both planes", "On a data plane they have the label `pool` too.", SHARED),
    ("Of the control plane", "", OF_CONTROL),
    ("Of a data plane", "All have the label `pool`.", OF_DATA),
    (PUSHES, "With `--plug-ins push`.", OF_PUSHES),
    (ENGINE, "", OF_ENGINE),
    (ROUTER, "", OF_ROUTER),
)
PROGRAMS: Final = {
    "kvplane up": (UpSettings, "up"),
    "kvplane control": (ControlPlaneSettings, "control_plane"),
    "kvplane data": (DataPlaneSettings, "data_plane"),
    "kvplane serve": (ServeSettings, "engine serve"),
    "kvplane generate": (GenerateSettings, "engine generate"),
    "kvplane layout": (PrintLayoutSettings, "engine layout"),
    "kvplane router": (RouterSettings, "router"),
    "python -m kvplane.integrations.events": (EventsSettings, "events"),
}
ADVICE: Final = {
    "INVALID_ARGUMENT": "repair the request",
    "NOT_FOUND": "open the session or admit the sequence, or use another id",
    "ALREADY_EXISTS": "use another id",
    "RESOURCE_EXHAUSTED": "wait for `retry_delay`, or free something",
    "OUT_OF_RANGE": "ask for less",
    "ABORTED": "begin again: open a session, admit the sequence, or read a snapshot",
    "FAILED_PRECONDITION": "repair what the caller believes of the state",
    "UNAUTHENTICATED": "identify yourself",
    "PERMISSION_DENIED": "ask for access",
    "UNAVAILABLE": "send the request again",
    "DEADLINE_EXCEEDED": "send the request again",
    "CANCELLED": "send the request again, if it is still wanted",
    "DATA_LOSS": "report it",
    "INTERNAL": "report it, with the request id",
}


def metrics() -> str:
    """Return the text of metrics.md."""
    return _head("metrics.md", "\n## ") + "".join(section(*each) for each in SECTIONS)


def _head(page: str, mark: str) -> str:
    return (FOLDER / page).read_text().partition(mark)[0]


def section(title: str, note: str, declarations: Iterable[Declaration]) -> str:
    """Return a heading, a note and a table."""
    rows = [row(declaration) for declaration in sorted(declarations, key=lambda d: d.name)]
    table = "\n".join(["| name | type | labels | what |", "|---|---|---|---|", *rows])
    return "\n".join(["", f"## {title}", "", *([note, ""] if note else []), table, ""])


def row(declaration: Declaration) -> str:
    """Return one line of a table."""
    labels = ", ".join(f"`{label}`" for label in declaration.labels)
    return f"| `{declaration.name}` | {declaration.kind} | {labels} | {declaration.help} |"


def errors() -> str:
    """Return the text of errors.md."""
    lines = ["| code | the caller | reason | what |\n|---|---|---|---|\n"]
    for code, advice in ADVICE.items():
        for i, error in enumerate(each for each, of in CODES.items() if of == code):
            first = f"| `{code}` | {advice}" if i == 0 else "|  | "
            what = " ".join((error.__doc__ or "").split())
            lines.append(f"{first} | `{reason_of(error)}` | {what} |\n")
    return _head("errors.md", "| code ") + "".join(lines)


def flags() -> str:
    """Return the text of flags.md."""
    parts = [_head("flags.md", "\n## ")]
    for command, (settings, program) in PROGRAMS.items():
        with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
            parse(settings, program, ["--help"], {}, command)
        parts.append(f"\n## {command}\n\n```text\n{printed.getvalue().rstrip()}\n```\n")
    return "".join(parts)


PAGES: Final = {"metrics.md": metrics, "errors.md": errors, "flags.md": flags}

if __name__ == "__main__":
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text())
