"""The command's inputs and outputs: tokens, TLS files, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvplane.clients.control_client import ControlClient
from kvplane.errors import InvalidRequestError
from kvplane.transport.tls import Tls

_MAX_TOKENS_FILE_BYTES: Final = 1 << 28


@dataclass(frozen=True)
class Context:
    """The options that all commands of ``kvplane`` have."""

    address: str
    timeout_s: float
    tls: Tls | None
    as_json: bool

    def client(self) -> ControlClient:
        """Make a client of the control plane. Call it on an event loop."""
        return ControlClient(self.address, tls=self.tls, timeout_s=self.timeout_s)

    def show(self, rows: Sequence[dict[str, Any]], title: str = "") -> None:
        """Print rows that have the same fields: as a table, or with --json as a list of objects."""
        if self.as_json:
            print_json(rows)
        else:
            Console().print(table_of(rows, title))


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def table_of(rows: Sequence[dict[str, Any]], title: str = "") -> Table:
    """Make a table of the rows, with numbers aligned to the right."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name, value in (rows[0] if rows else {"nothing": ""}).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        justify: Any = "right" if is_number else "left"
        # Fold long values: half of a session's id is of no use.
        table.add_column(name.replace("_", " "), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row.values()))
    return table


def read_tokens(given: str) -> list[int]:
    """Parse token ids: "1,2,3", "@file" or "-" for standard input, separated by commas or spaces,
    or as a JSON list. Raises InvalidRequestError.
    """
    text = given
    try:
        if given == "-":
            text = sys.stdin.read(_MAX_TOKENS_FILE_BYTES)
        elif given.startswith("@"):
            with Path(given[1:]).open(encoding="utf-8") as file:
                text = file.read(_MAX_TOKENS_FILE_BYTES)
        tokens = [int(word) for word in text.strip().strip("[]").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot be read: {error}", field="tokens") from error
    if not tokens:
        raise InvalidRequestError("must be at least one token id", field="tokens")
    return tokens


def share(part: float, whole: float) -> str:
    """Format ``part`` as a percentage of ``whole``; a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def only_pool(pool_ids: Iterable[str], wanted: str) -> str:
    """Return the pool named by ``wanted``, or the only pool. Raises InvalidRequestError."""
    found = list(pool_ids)
    if wanted:
        return wanted
    if len(found) != 1:
        raise InvalidRequestError(
            f"must be one of {', '.join(found) or 'none: no pool has registered'}", field="pool"
        )
    return found[0]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
