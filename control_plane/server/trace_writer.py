"""Writes the traffic as a trace of requests, which ``python -m benchmarks.replay`` reads.

    event loop ──► queue, bounded ──► thread: numbers the prefixes, joins both ends ──► file

A row is a JSON line: ``timestamp`` (ms since the writer began), ``input_length``, ``output_length``
(tokens) and ``hash_ids``, a number for each full block of the prompt. Numbers are given in the
order in which prefixes first appear, so neither tokens nor hashes are in the file. Tenants and
namespaces share none, since their prefixes have different hashes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from pathlib import Path
from typing import Final, NamedTuple, TextIO

_LOGGER: Final = logging.getLogger(__name__)
_HASH_BYTES: Final = 16
_EVENT_BYTES: Final = 128  # besides its hashes
_MAX_QUEUED_BYTES: Final = 32 << 20
# Of which the numbers are known. One that is forgotten gets a new number when it comes again.
MAX_PREFIXES: Final = 1 << 20
# Of all requests whose sequences live; beyond it the oldest are written as if they had ended.
_MAX_WAITING_IDS: Final = 4 << 20
_Key = tuple[int, int]  # ids of the session and the sequence


class _Event(NamedTuple):
    """``hashes``: None of a sequence that is freed. ``num_tokens``: of the prompt, or of all."""

    key: _Key
    time_s: float
    num_tokens: int
    hashes: bytes | None

    @property
    def num_bytes(self) -> int:
        return _EVENT_BYTES + len(self.hashes or b"")


class _Waiting(NamedTuple):
    time_s: float
    num_prompt_tokens: int
    ids: array[int]


class TraceWriter:
    """Observes the core's traffic. What the thread cannot keep up with is dropped and counted."""

    def __init__(self, path: Path, max_bytes: int, *, max_prefixes: int = MAX_PREFIXES) -> None:
        """Begin a file. One that exists, or has grown to ``max_bytes``, becomes ``PATH.1`` in place
        of the last such file. Raises OSError.
        """
        self.num_dropped = 0
        self._path = path
        self._max_bytes = max_bytes
        self._began_s = time.monotonic()
        self._changed = threading.Condition()
        self._events: deque[_Event] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._numbers = _Numbers(max_prefixes)
        self._waiting: OrderedDict[_Key, _Waiting] = OrderedDict()
        self._num_waiting_ids = 0
        self._file: TextIO | None = self._begin_file()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def admitted(
        self, session_id: int, sequence_id: int, num_prompt_tokens: int, hashes: bytes
    ) -> None:
        """A request began."""
        self._add(_Event((session_id, sequence_id), self._now_s(), num_prompt_tokens, hashes))

    def freed(self, session_id: int, sequence_id: int, num_tokens: int) -> None:
        """A request ended."""
        self._add(_Event((session_id, sequence_id), self._now_s(), num_tokens, None))

    def close(self) -> None:
        """Write all that was observed; sequences that live as if they ended with their prompts."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self.num_dropped:
            _LOGGER.warning("trace is not complete dropped=%d", self.num_dropped)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _add(self, event: _Event) -> None:
        with self._changed:
            if self._queued_bytes + event.num_bytes > _MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            self._queued_bytes += event.num_bytes
            self._events.append(event)
            self._changed.notify()

    # The thread

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closing)
                events, self._events = self._events, deque()
                self._queued_bytes = 0
                closing = self._closing
            if self._file is None:
                continue
            try:
                for event in events:
                    self._take(event)
                if closing:
                    while self._waiting:
                        self._write_oldest()
                self._file.flush()
            except OSError as error:
                _LOGGER.error("trace ends here path=%s error=%s", self._path, error)
                self._end_file()
        self._end_file()

    def _take(self, event: _Event) -> None:
        waiting = self._waiting.pop(event.key, None)
        if waiting is not None:
            self._num_waiting_ids -= len(waiting.ids)
        if event.hashes is not None:  # if one waits, its admission was aborted
            ids = self._numbers.of(event.hashes)
            self._waiting[event.key] = _Waiting(event.time_s, event.num_tokens, ids)
            self._num_waiting_ids += len(ids)
            while self._num_waiting_ids > _MAX_WAITING_IDS:
                self._write_oldest()
        elif waiting is not None:
            self._write(waiting, event.num_tokens - waiting.num_prompt_tokens)

    def _write_oldest(self) -> None:
        _, waiting = self._waiting.popitem(last=False)
        self._num_waiting_ids -= len(waiting.ids)
        self._write(waiting, 0)

    def _write(self, waiting: _Waiting, num_output_tokens: int) -> None:
        row = {
            "timestamp": round(waiting.time_s * 1000),
            "input_length": waiting.num_prompt_tokens,
            "output_length": max(0, num_output_tokens),
            "hash_ids": waiting.ids.tolist(),
        }
        assert self._file is not None
        self._num_bytes += self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        if self._num_bytes >= self._max_bytes:
            self._file.close()
            self._file = self._begin_file()

    def _end_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a file that could not be written before
                self._file.close()
        self._file = None

    def _begin_file(self) -> TextIO:
        if self._path.is_file():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._num_bytes = 0
        return self._path.open("w")


class _Numbers:
    """Numbers prefixes; forgets those that were not seen while half of ``max_prefixes`` were."""

    def __init__(self, max_prefixes: int) -> None:
        self._max_recent = max_prefixes // 2
        self._recent: dict[bytes, int] = {}
        self._earlier: dict[bytes, int] = {}
        self._num_given = 0

    def of(self, hashes: bytes) -> array[int]:
        ids: array[int] = array("q")
        for i in range(0, len(hashes), _HASH_BYTES):
            key = hashes[i : i + _HASH_BYTES]
            number = self._recent.get(key)
            if number is None:
                number = self._earlier.pop(key, self._num_given)
                self._num_given += number == self._num_given
                self._recent[key] = number
                if len(self._recent) >= self._max_recent:
                    self._recent, self._earlier = {}, self._recent
            ids.append(number)
        return ids
