"""Reads traces of requests, in the form in which Mooncake publishes them.

A file has a line of JSON for each request: ``timestamp`` in milliseconds, and ``hash_ids``, each of
which stands for a block of 512 prompt tokens. Blocks at the same place are equal if all ids up to
there are. A path may end in ``.gz``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

BLOCK_TOKENS: Final = 512


class TraceError(ValueError):
    """A trace that cannot be read; says where and why."""


class Request(NamedTuple):
    """``time_s``: since the trace began. ``ids``: one for each block of the prompt."""

    time_s: float
    ids: list[int]


def read_trace(path: Path) -> list[Request]:
    """Read a trace; return its requests in the order of time. Raises TraceError."""
    try:
        requests = sorted(_requests(path), key=lambda request: request.time_s)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if not requests:
        raise TraceError(f"{path}: has no requests")
    return requests


def reused(requests: Iterable[Request]) -> Iterator[int]:
    """Yield for each request the number of blocks that an unlimited cache would find."""
    known: dict[tuple[int, int], int] = {}  # (number of the prefix before, id) -> its own number
    for request in requests:
        prefix = num = 0
        for trace_id in request.ids:
            num += (prefix, trace_id) in known
            prefix = known.setdefault((prefix, trace_id), len(known) + 1)
        yield num


def _requests(path: Path) -> Iterator[Request]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        yield Request(_timestamp(row, where) / 1000, _ids(row, where))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: {error}") from None


def _timestamp(row: Any, where: str) -> float:
    value = row.get("timestamp") if isinstance(row, Mapping) else None
    if not isinstance(value, int | float):
        raise TraceError(f"{where}: timestamp must be a number")
    return float(value)


def _ids(row: Any, where: str) -> list[int]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers")
    return ids
