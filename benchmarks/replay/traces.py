"""Reads traces of requests, as published by several projects, into one form.

| format | a file is | time | tokens an id |
|---|---|---|---|
| mooncake | JSON lines: ``timestamp``, ``hash_ids`` | ms | 512 |
| bailian | the same, as Alibaba Cloud's Bailian publishes them | s | 16 |
| dynamo | as mooncake; in a session, ``delay`` is the time since its last line | ms | 512 |
| kv-cache-tester | one conversation: JSON, its ``requests`` with ``t`` and ``hash_ids`` | s | 64 |

An id stands for a block of prompt tokens. Blocks at the same place are equal if all ids up to there
are. A path may end in ``.gz``. It may be a folder of conversations for ``kv-cache-tester``: they
begin at even intervals over the length of the longest, since their start times are not recorded.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class TraceError(ValueError):
    """A trace that cannot be read; says where and why."""


class Request(NamedTuple):
    """``time_s``: since the trace began. ``ids``: one for each block of the prompt."""

    time_s: float
    ids: list[int]


@dataclass(frozen=True)
class Format:
    """How to read a trace, and the tokens that each of its ids stands for."""

    read: Callable[[Path], Iterator[Request]]
    block_tokens: int


def read_trace(path: Path, name: str) -> list[Request]:
    """Read a trace; return its requests in the order of time. Raises TraceError."""
    try:
        requests = sorted(FORMATS[name].read(path), key=lambda request: request.time_s)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if not requests:
        raise TraceError(f"{path}: has no requests")
    return requests


def _mooncake(path: Path) -> Iterator[Request]:
    for where, row in _lines(path):
        yield Request(_number(row, "timestamp", where) / 1000, _ids(row, where))


def _bailian(path: Path) -> Iterator[Request]:
    for where, row in _lines(path):
        yield Request(_number(row, "timestamp", where), _ids(row, where))


def _dynamo(path: Path) -> Iterator[Request]:
    session_time_ms: dict[str, float] = {}
    for where, row in _lines(path):
        session = row.get("session_id")
        delay_name = "delay" if "delay" in row else "delay_ms"
        if session in session_time_ms and row.get(delay_name) is not None:
            time_ms = session_time_ms[session] + _number(row, delay_name, where)
        else:
            time_name = "timestamp" if "timestamp" in row else "created_time"
            time_ms = _number(row, time_name, where)
        if session is not None:
            session_time_ms[session] = time_ms
        yield Request(time_ms / 1000, _ids(row, where))


def _kv_cache_tester(path: Path) -> Iterator[Request]:
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    conversations = [list(_conversation(file, i)) for i, file in enumerate(files)]
    longest_s = max((r.time_s for requests in conversations for r in requests), default=0.0)
    for i, requests in enumerate(conversations):
        for time_s, ids in requests:
            yield Request(time_s + i * longest_s / len(files), ids)


def _conversation(path: Path, index: int) -> Iterator[Request]:
    try:
        conversation = json.loads(_text(path))
        is_local = conversation.get("hash_id_scope", "local") == "local"
        rows = list(_with_sub_agents(conversation["requests"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: is not a conversation of kv-cache-tester: {error!r}") from None
    first = (index + 1) << 40 if is_local else 0
    for i, row in enumerate(rows):
        where = f"{path}: requests[{i}]"
        yield Request(_number(row, "t", where), [first + i for i in _ids(row, where)])


def _with_sub_agents(rows: Iterable[Any]) -> Iterator[Any]:
    for row in rows:
        if "requests" in row:
            yield from _with_sub_agents(row["requests"])
        else:
            yield row


FORMATS = {
    "mooncake": Format(_mooncake, 512),
    "bailian": Format(_bailian, 16),
    "dynamo": Format(_dynamo, 512),
    "kv-cache-tester": Format(_kv_cache_tester, 64),
}


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path}:{number}: {error}") from None


def _number(row: Any, name: str, where: str) -> float:
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, int | float):
        raise TraceError(f"{where}: {name} must be a number")
    return float(value)


def _ids(row: Any, where: str) -> list[int]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers")
    return ids
