"""A pool of blocks as the queue sees it, and what engines keep in it."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

BLOCK_TOKENS: Final = 16
CHUNK_BLOCKS: Final = 32
CHUNK_TOKENS: Final = BLOCK_TOKENS * CHUNK_BLOCKS
NUM_BLOCKS: Final = 36_000


@dataclass(slots=True)
class Request:
    """A prompt and its output. ``num_seen``: tokens that were computed before, once."""

    ids: list[int]
    num_prompt: int
    num_output: int
    num_made: int = 0
    num_seen: int = 0
    asked_s: float | None = None
    admitted: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_made


@dataclass(slots=True, eq=False)
class Live:
    """A sequence that holds ``chunks``, which are shared, and blocks of its own."""

    engine: Engine
    id: int
    request: Request
    chunks: list[int]
    num_own: int
    progress_s: float
    prefilled: bool = False
    gone: bool = False

    @property
    def num_blocks(self) -> int:
        return self.num_own + CHUNK_BLOCKS * len(self.chunks)


@dataclass(slots=True, eq=False)
class Engine:
    """An engine with one open session."""

    kind: str
    new_request: Callable[[], Request]
    session: int = 0
    live: dict[int, Live] = field(default_factory=dict)
    again: deque[Request] = field(default_factory=deque)
    asked: Request | None = None
    asked_id: int = 0
    gpu_free_s: float = 0.0
    admitted_s: list[float] = field(default_factory=list)


class Blocks:
    """The pool, as the queue sees it."""

    num_blocks = NUM_BLOCKS

    def __init__(self, live: Callable[[int], dict[int, Live]]) -> None:
        self._live = live
        self.num_used = 0
        self.num_retired = 0
        self.references: dict[int, int] = {}  # chunk -> sequences that refer to it; 0: cached
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._retired: dict[int, deque[list[float]]] = defaultdict(deque)  # [since, blocks]
        self._num_retired: Counter[int] = Counter()

    def num_obtainable(self, session: int) -> int:
        return self._num_free() + self._num_retired[session]

    def num_pending(self, session: int) -> int:
        return self.num_retired - self._num_retired[session]

    def num_held(self, session: int, sequence: int) -> int:
        return self._live(session)[sequence].num_blocks

    def num_held_by(self, session: int) -> int:
        return sum(live.num_blocks for live in self._live(session).values())

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        live = self._live(session)[sequence]
        return live.progress_s, not live.prefilled

    def retired_since(self, session: int) -> float | None:
        entries = self._retired[session]
        return entries[0][0] if entries else None

    def hits(self, request: Request) -> list[int]:
        """Return the number of leading chunks that are there. The last token is always computed."""
        at_most = (request.num_prompt - 1) // CHUNK_TOKENS
        return list(itertools.takewhile(self.references.__contains__, request.ids[:at_most]))

    def num_needed(self, request: Request, hits: list[int]) -> int:
        """Return the number of blocks to obtain: all but the hits in use."""
        num_in_use = sum(self.references[chunk] > 0 for chunk in hits)
        return -(-request.num_tokens // BLOCK_TOKENS) - CHUNK_BLOCKS * num_in_use

    def take(self, session: int, num_blocks: int) -> None:
        """Allocate free and evictable blocks first, then the session's own retired ones."""
        num_own = max(0, num_blocks - self._num_free())
        self._unretire(session, num_own)
        self.num_used += num_blocks
        while self.num_used + self.num_retired + CHUNK_BLOCKS * len(self._cached) > NUM_BLOCKS:
            del self.references[self._cached.popitem(last=False)[0]]

    def refer(self, chunks: list[int]) -> None:
        for chunk in chunks:
            if not self.references[chunk]:
                del self._cached[chunk]
            self.references[chunk] += 1

    def release(self, live: Live, now_s: float) -> list[float]:
        """Retire the blocks that only this sequence held; return the entry for ``receipt``."""
        num_blocks = live.num_own
        for chunk in reversed(live.chunks):
            self.references[chunk] -= 1
            if not self.references[chunk]:
                self._cached[chunk] = None
                num_blocks += CHUNK_BLOCKS
        self.num_used -= num_blocks
        self.num_retired += num_blocks
        session = live.engine.session
        self._num_retired[session] += num_blocks
        entry = [now_s, num_blocks]
        self._retired[session].append(entry)
        return entry

    def receipt(self, session: int, entry: list[float]) -> None:
        """Let every session allocate the blocks that are left of an entry."""
        if entry in self._retired[session]:
            self._unretire(session, int(entry[1]))

    def fenced(self, session: int) -> None:
        self._unretire(session, self._num_retired[session])

    def _unretire(self, session: int, num_blocks: int) -> None:
        entries = self._retired[session]
        self._num_retired[session] -= num_blocks
        self.num_retired -= num_blocks
        while entries and (num_blocks or not entries[0][1]):
            num = min(num_blocks, entries[0][1])
            entries[0][1] -= num
            num_blocks -= int(num)
            if not entries[0][1]:
                entries.popleft()

    def _num_free(self) -> int:
        return NUM_BLOCKS - self.num_used - self.num_retired
