"""The command's inputs and outputs: tokens, TLS files, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.console import Console
from rich.table import Table

from kvplane.errors import InvalidRequestError, KvplaneError, PlaneUnavailableError
from kvplane.serving.config import ClientTls
from kvplane.serving.settings import setting

if TYPE_CHECKING:
    from kvplane.clients.control_client import ControlClient

_REFUSALS_S: Final = 1.0
"""How long an address may refuse connections: a plane that starts is listened to soon."""
_MAX_TOKENS_FILE_BYTES: Final = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Context(ClientTls):
    """The options that all commands have which ask a control plane."""

    HEADING: ClassVar[str] = "Calls"

    timeout_s: float = setting(10.0, minimum=0.001, help="Deadline of a call.", unit="s")
    json: bool = setting(False, help="Print JSON, one value a line.")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ControlClient]:
        """Open a client of the control plane. Raises as ``require_listener`` does."""
        from kvplane.clients.control_client import ControlClient

        await self.require_listener(self.control_plane)
        tls, timeout_s = self.client_tls, self.timeout_s
        async with ControlClient(self.control_plane, tls=tls, timeout_s=timeout_s) as client:
            yield client

    async def require_listener(self, address: str) -> None:
        """Raise PlaneUnavailableError within a second when nothing listens at an address."""
        from kvplane.transport.health import check

        timeout_s = min(self.timeout_s, _REFUSALS_S)
        try:
            await check(address, tls=self.client_tls, timeout_s=timeout_s)
        except PlaneUnavailableError as error:
            if "refused" in str(error):
                raise PlaneUnavailableError(
                    f"nothing listens at {address}: start planes with 'kvplane up' or 'kvplane "
                    "control', or name others with --control-plane or KVPLANE_CONTROL_PLANE"
                ) from error
        except KvplaneError:
            return  # the call itself will raise it, or wait longer

    def show(self, rows: Sequence[dict[str, Any]], title: str = "") -> None:
        """Print rows that have the same fields: as a table, or with --json as a list of objects."""
        if self.json:
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
