"""Random bytes as calls of a pool: it may refuse what a caller can get wrong, and stays whole.

Numbers of steps, plans and slots are as the control plane gives them; all else is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplane_blocks._native import Pool

if TYPE_CHECKING:
    from atheris import FuzzedDataProvider

NUM_BLOCKS = 10
EXTREMES = (-(2**63), -1, 0, 2**31 - 1, 2**31, 2**63 - 1)


@dataclass
class Session:
    """An open session and its last number."""

    slot: int
    number: int = 1


class Calls:
    """One pool, and the calls that the input makes."""

    def __init__(self, data: FuzzedDataProvider) -> None:
        self.data = data
        window, num_host = data.PickValueInList([0, 0, 3]), data.ConsumeIntInRange(0, 6)
        self.pool = Pool(
            4, NUM_BLOCKS, num_host, b"", b"", "lru",
            window_tokens=window, max_sequences=8, max_table_entries=64,
        )  # fmt: skip
        self.sessions = [self.open(b"a", 1) for _ in range(2)]
        self.ended: list[int] = []

    def open(self, root: bytes, owner: int) -> Session:
        """A session whose first step has begun."""
        session = Session(self.pool.open_session(root, owner))
        self.pool.begin(session.slot, session.number, False)
        return session

    # Values

    def number(self, most: int) -> int:
        """A small number, or an extreme one."""
        found = self.data.ConsumeIntInRange(0, most + len(EXTREMES))
        return found if found <= most else EXTREMES[found - most - 1]

    def column(self, width: int, num: int, most: int) -> bytes:
        """``num`` elements, or now and then any bytes."""
        if self.data.ConsumeIntInRange(0, 31) == 31:
            return bytes(self.data.ConsumeBytes(self.data.ConsumeIntInRange(0, 24)))
        top = 8 * width - 1
        values = (min(max(self.number(most), -(1 << top)), (1 << top) - 1) for _ in range(num))
        return b"".join(value.to_bytes(width, "little", signed=True) for value in values)

    def ids(self, num: int) -> bytes:
        return self.column(8, num, 9)

    def positions(self, session: Session, ids: bytes) -> bytes:
        """Where the sequences are, mostly."""
        states = self.pool.states(session.slot, None)
        known, scheduled = (memoryview(states[i]).cast("q").tolist() for i in (0, 3))
        where = dict(zip(known, scheduled, strict=True))
        named = [int.from_bytes(ids[i : i + 8], "little", signed=True)
                 for i in range(0, len(ids) - 7, 8)]  # fmt: skip
        return b"".join(where.get(i, 0).to_bytes(8, "little") for i in named)

    # Calls

    def admit(self, session: Session) -> None:
        data = self.data
        granted = [session.number] if data.ConsumeBool() else []
        call: Callable[..., Any] = self.pool.grant if granted else self.pool.admit
        tokens = data.ConsumeIntInRange(0, 44)
        call(
            session.slot,
            *granted,
            self.number(9),
            self.column(4, 1, 2) * tokens,
            self.ids(data.ConsumeIntInRange(0, 2)),
            self.number(9),
            self.number(48),
            data.ConsumeBool(),
            self.number(3),
        )

    def append(self, session: Session) -> None:
        num = self.data.ConsumeIntInRange(0, 3)
        ids = self.ids(num)
        counts = [self.data.ConsumeIntInRange(0, 3) for _ in range(num)]
        self.pool.append(
            session.slot,
            ids,
            self.positions(session, ids),
            self.column(4, num, 6),
            b"".join(count.to_bytes(4, "little") for count in counts),
            self.column(4, sum(counts), 2),
            self.column(4, num, 9) if self.data.ConsumeBool() else b"",
        )

    def truncate(self, session: Session) -> None:
        num = self.data.ConsumeIntInRange(0, 2)
        self.pool.truncate(session.slot, self.ids(num), self.column(8, num, 20))

    def fork(self, session: Session) -> None:
        num = self.data.ConsumeIntInRange(0, 3)
        self.pool.fork(session.slot, self.ids(num), self.ids(num))

    def free(self, session: Session) -> None:
        self.pool.free(session.slot, self.ids(self.data.ConsumeIntInRange(0, 3)))

    def swap(self, session: Session) -> None:
        ids = self.ids(self.data.ConsumeIntInRange(0, 3))
        self.pool.swap(session.slot, ids, self.data.ConsumeIntInRange(0, 3))

    def cut(self, session: Session) -> None:
        self.pool.cut(session.slot, self.number(9))

    def next_step(self, session: Session) -> None:
        self.pool.end_dry_run()
        self.pool.finish(session.slot, b"")
        session.number += 1
        self.pool.begin(session.slot, session.number, False)

    def dry_run(self, session: Session) -> None:
        self.pool.finish(session.slot, b"")
        self.pool.begin(session.slot, session.number + 1, True)
        for call in (self.admit, self.append, self.fork, self.truncate, self.free):
            guarded(call, session)
        self.pool.end_dry_run()
        session.number += 1
        self.pool.begin(session.slot, session.number, False)

    def deferred(self, session: Session) -> None:
        ids, counts = self.ids(1), self.column(4, 1, 4)
        tokens = self.column(4, 1, 2) * (int.from_bytes(counts[:1], "little") % 8)
        self.pool.deferred_tokens(
            session.slot, ids, self.column(8, 1, 9), self.column(8, 1, 20), counts, tokens
        )

    def receipted(self, session: Session) -> None:
        last = self.pool.last_plan(session.slot)
        if self.pool.plans_in_flight(session.slot):
            self.pool.receipted(session.slot, self.data.ConsumeIntInRange(0, last))

    def abort(self, session: Session) -> None:
        session.number += 1
        self.pool.abort(session.slot, session.number)

    def end(self, session: Session) -> None:
        self.pool.end_session(session.slot)
        self.ended.append(session.slot)
        root = self.data.PickValueInList([b"a", b"b", b""])
        self.sessions[self.sessions.index(session)] = self.open(root, 2)

    def fence(self, session: Session) -> None:
        self.pool.session_fenced(self.ended.pop() if self.ended else self.number(9) % 2**32)

    def ask(self, session: Session) -> None:
        tokens = self.column(4, 1, 2) * 9
        self.pool.match(b"a", tokens)
        self.pool.explain(b"b", tokens)
        self.pool.match_hashes(b"a", self.data.ConsumeBytes(40))
        self.pool.take_publications(1 + self.data.ConsumeIntInRange(0, 3))
        self.pool.table(session.slot, self.number(9))
        self.pool.common_prefix(session.slot, self.ids(2))

    CALLS = (
        admit, append, truncate, fork, free, swap, cut, next_step, dry_run, deferred, receipted,
        abort, end, fence, ask,
    )  # fmt: skip


def guarded(call: Callable[[Session], None], session: Session) -> None:
    """What a caller is told of: ValueError, of which ColumnError is one, IndexError, KeyError."""
    try:
        call(session)
    except (ValueError, IndexError, KeyError):
        return


def fuzz_pool(data: FuzzedDataProvider) -> None:
    calls = Calls(data)
    while data.remaining_bytes():
        call = Calls.CALLS[data.ConsumeIntInRange(0, len(Calls.CALLS) - 1)]
        session = calls.sessions[data.ConsumeIntInRange(0, 1)]
        guarded(lambda s, call=call: call(calls, s), session)
    calls.pool.check_integrity()
