"""Calls of the native core with lists in place of columns, and its plans decoded."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from kvplane_blocks import LayerGroup, Pool

from kvplane.wire.plane.v1 import plan_pb2

DEVICE, HOST = 1, 2
NO_BLOCK = 0xFFFFFFFF
FEW_BLOCKS = 2
"""Half of all plans prepare publications and whole tables by so many blocks at a time."""
PROMPT = list(range(6))

Failure = tuple[int, int, int, int, int]
Rows = tuple[list[int], list[Failure]]
Row = TypeVar("Row")
Found = tuple[tuple[int, int], tuple[bytes, ...]]
"""Of a search: the blocks found on the device and behind them, and the columns of all of them."""


class Code(enum.IntEnum):
    """Why an item is refused: the codes of csrc/blocks/core/operations.h."""

    LATER = 2
    NEVER = 3
    LATER_HEADROOM = 4
    LATER_QUOTA = 5
    NEVER_QUOTA = 6
    NOT_FOUND = 10
    EXISTS = 11
    BAD_ID = 12
    BUSY = 13
    SWAPPED = 14
    POSITION = 15
    NEGATIVE = 16
    TOO_MANY_SEQUENCES = 17
    NOT_KNOWN = 18
    OTHER_ADMISSION = 19
    TOO_LONG = 20
    TRIMMED = 21
    OTHER_TOKENS = 22
    BEYOND_SLOTS = 23
    TOO_MANY_ENTRIES = 24
    TOO_MANY_PINNED = 25
    CHECKPOINT = 26


class Kind(enum.IntEnum):
    """Kinds of table changes."""

    SET = 1
    REPLACE = 2
    FORK = 3
    DROP = 4
    TRUNCATE = 5
    TRIM = 6
    KEEP = 7


class Ref(NamedTuple):
    """A block with the generation of its allocation."""

    tier: int
    index: int
    generation: int

    @property
    def place(self) -> tuple[int, int]:
        return (self.tier, self.index)


class Change(NamedTuple):
    kind: int
    sequence_id: int
    tier: int
    first: int
    num: int
    parent_id: int
    blocks: list[Ref | None]
    allocated: list[bool]
    group: int = 0


class Span(NamedTuple):
    sequence_id: int
    first: int
    num: int


class State(NamedTuple):
    """The core's state of a sequence."""

    sequence_id: int
    admitted_by: int
    num_tokens: int
    num_scheduled: int
    num_written: int
    num_cached: int
    num_blocks: int
    tier: int


@dataclass(frozen=True)
class MadePlan:
    """One plan."""

    number: int
    previous: int
    resync: bool
    finished: int  # the last plan that has run, where tables are kept
    changes: list[Change]
    transfers: list[tuple[Ref, Ref]]
    spans: list[Span]
    allocations: list[Ref]
    transfer_groups: list[int]
    allocation_groups: list[int]
    expected: dict[int, list[int]] = field(default_factory=dict)  # for the simulation

    def in_group(self, group: int) -> MadePlan:
        """Return the plan's part in one layer group."""
        return replace(
            self,
            changes=[change for change in self.changes if change.group == group],
            transfers=_of(group, self.transfers, self.transfer_groups),
            allocations=_of(group, self.allocations, self.allocation_groups),
        )


def _of(group: int, rows: list[Row], groups: list[int]) -> list[Row]:
    return [row for row, its_group in zip(rows, groups, strict=True) if its_group == group]


def i32(values: Iterable[int]) -> bytes:
    """Return an int32 column."""
    values = list(values)
    return struct.pack(f"<{len(values)}i", *values)


def i64(values: Iterable[int]) -> bytes:
    """Return an int64 column."""
    values = list(values)
    return struct.pack(f"<{len(values)}q", *values)


def ints(column: bytes, width: str) -> list[int]:
    """Return the elements of a column; ``width``: a letter of ``struct``."""
    return list(struct.unpack(f"<{len(column) // struct.calcsize(width)}{width}", column))


def refs(tiers: bytes, indices: bytes, generations: bytes) -> list[Ref]:
    return [
        Ref(*each)
        for each in zip(ints(tiers, "B"), ints(indices, "i"), ints(generations, "q"), strict=True)
    ]


def groups(column: bytes, num: int) -> list[int]:
    """Return a column of groups of ``num`` rows, which may be left out."""
    return ints(column, "B") or [0] * num


def decoded(payload: bytes) -> MadePlan:
    """Return a plan's columns, row by row."""
    plan = plan_pb2.Plan.FromString(payload)
    moves, spans, extra = plan.transfers, plan.spans, plan.allocations
    return MadePlan(
        number=plan.number,
        previous=plan.previous,
        resync=plan.resync,
        finished=plan.finished,
        changes=_changes(plan.changes),
        transfers=list(
            zip(
                refs(moves.source_tiers, moves.source_indices, moves.source_generations),
                refs(
                    moves.destination_tiers,
                    moves.destination_indices,
                    moves.destination_generations,
                ),
                strict=True,
            )
        ),
        spans=[
            Span(*each)
            for each in zip(
                ints(spans.sequence_ids, "q"),
                ints(spans.first_positions, "i"),
                ints(spans.num_tokens, "i"),
                strict=True,
            )
        ],
        allocations=refs(extra.tiers, extra.indices, extra.generations),
        transfer_groups=groups(moves.groups, len(moves.source_tiers)),
        allocation_groups=groups(extra.groups, len(extra.tiers)),
    )


def _changes(message: plan_pb2.TableChanges) -> list[Change]:
    entries = zip(
        ints(message.indices, "i"),
        ints(message.generations, "q"),
        ints(message.allocated, "B"),
        strict=True,
    )
    parents = iter(ints(message.parent_sequence_ids, "q"))
    changes = []
    for group, kind, sequence_id, tier, first, num in zip(
        groups(message.groups, len(message.kinds)),
        ints(message.kinds, "B"),
        ints(message.sequence_ids, "q"),
        ints(message.tiers, "B"),
        ints(message.first_blocks, "i"),
        ints(message.num_blocks, "i"),
        strict=True,
    ):
        own = list(islice(entries, num)) if kind <= Kind.REPLACE else []
        assert (kind <= Kind.REPLACE) == bool(tier)
        parent = next(parents) if kind == Kind.FORK else 0
        blocks = [None if i == -1 else Ref(tier, i, generation) for i, generation, _ in own]
        assert all(
            ref or not generation for ref, (_, generation, _) in zip(blocks, own, strict=True)
        )
        allocated = [bool(flag) for _, _, flag in own]
        changes.append(
            Change(kind, sequence_id, tier, first, num, parent, blocks, allocated, group)
        )
    assert not list(entries)
    assert not list(parents)
    return changes


class OneGroup(Pool):
    """A pool of one layer group, which answers what is asked of the group, too."""

    def __init__(self, group: LayerGroup) -> None:
        super().__init__([group])
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def find(self, root: bytes, token_ids: bytes = b"", hashes: bytes = b"") -> Found:
        """Search for a prompt, given by its tokens or by hashes, at once."""
        return find(self, self.group, root, token_ids, hashes)

    def match(self, root: bytes, token_ids: bytes) -> tuple[int, int, bytes]:
        """Search; return the blocks found on the device and behind them, and their hashes."""
        counts, (hashes, *_) = self.find(root, token_ids)
        return *counts, hashes

    def explain(self, root: bytes, token_ids: bytes) -> tuple[bytes, ...]:
        """Search; return the columns of the blocks found."""
        return self.find(root, token_ids)[1]


def find(
    pool: Pool, group: LayerGroup, root: bytes, token_ids: bytes = b"", hashes: bytes = b""
) -> Found:
    """Search a pool for a prompt at once; return what lies in one of its layer groups."""
    search = pool.search(group, root, token_ids, hashes, True)
    assert not search.search_some(1 << 40)
    return search.counts(), search.blocks()


def new_pool(
    num_device: int, num_host: int = 0, *, block_size: int = 4, **options: int
) -> OneGroup:
    """Return a pool whose blocks were never allocated."""
    return OneGroup(LayerGroup(block_size, num_device, num_host, **options))


def publications(group: LayerGroup) -> list[tuple[bytes, ...]]:
    """Return all published blocks whose parents are known to data planes, in runs of one root."""
    return list(group.publications_in(0, 1 << 32)[0])


class View:
    """The core's view of a session, in one layer group."""

    def __init__(self, pool: Any, handle: int) -> None:
        self.pool, self.handle = pool, handle

    def states(self) -> list[State]:
        """Return the states of all sequences, by id."""
        columns = self.pool.states(self.handle, None)
        widths = ("q", "q", "i", "i", "i", "i", "i", "B")
        rows = zip(*(ints(c, w) for c, w in zip(columns, widths, strict=True)), strict=True)
        return [State(*row) for row in rows]

    def state(self, sequence_id: int) -> State:
        (found,) = (state for state in self.states() if state.sequence_id == sequence_id)
        return found

    def table(self, sequence_id: int) -> list[Ref | None]:
        """Return a sequence's blocks; None where one was trimmed, or there is no checkpoint."""
        tier, blocks, generations, _, num_trimmed = self.pool.table(self.handle, sequence_id)
        found = [
            None if block == NO_BLOCK else Ref(tier, block, generation)
            for block, generation in zip(ints(blocks, "I"), ints(generations, "q"), strict=True)
        ]
        assert not any(found[:num_trimmed]), "a trimmed entry has a block"
        assert len(found) == num_trimmed or (found[num_trimmed] and found[-1]), "it is not trimmed"
        return found


class Caller(View):
    """A session of a pool, of one layer group or of several. Items that are refused are returned,
    never raised.
    """

    def __init__(self, pool: Any, root: bytes = b"root", owner: int = 1) -> None:
        super().__init__(pool, pool.open_session(root, owner))
        self.root, self.owner = root, owner
        self.number = self._num_pieces = 0

    # Steps

    def begin(self) -> None:
        """Begin the next step."""
        self.number += 1
        self.pool.begin(self.handle, self.number)

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Make operations report what the next step would answer to each item alone."""
        pool, self.pool = self.pool, _Checks(self.pool, self.number + 1)
        try:
            yield
        finally:
            self.pool = pool

    def check_some(self) -> None:
        """Check a pool of one group between two slices, every eighth time."""
        self._num_pieces += 1
        if self._num_pieces % 8 == 1 and isinstance(self.pool, OneGroup):
            self.pool.check_integrity()

    def finish(self) -> MadePlan | None:
        """End the step; return its plan, or None."""
        while self.number % 2 and self.pool.prepare(self.handle, FEW_BLOCKS):
            pass
        payload = self.pool.finish(self.handle, b"")
        return None if payload is None else decoded(payload)

    def ran(self) -> None:
        """End the step. Its plan has run, and the pool, which has one group, is sound."""
        self.finish()
        self.receipted()
        self.pool.check_integrity()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Run a step whose plan stays in flight."""
        self.begin()
        yield
        self.finish()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step; at its end its plan has run."""
        self.begin()
        yield
        self.ran()

    def admit(
        self,
        sequence_id: int,
        tokens: Sequence[int],
        *,
        forks: Sequence[int] = (),
        num_compute: int = -1,
        max_total: int = 0,
        skip: bool = False,
        headroom: int = 0,
        checkpoint: int = 0,
        admitted_by: int | None = None,
    ) -> tuple[int, ...]:
        """Admit: (cached tokens, blocks, scheduled tokens), or a failure, which has five elements.
        ``admitted_by``: the admission is granted outside of a step.
        """
        rest = (sequence_id, i32(tokens), i64(forks), num_compute, max_total, skip, headroom)
        if admitted_by is None:
            more = {"checkpoint": checkpoint} if checkpoint else {}
            answer: tuple[int, ...] = self.pool.admit(self.handle, *rest, **more)
        else:
            answer = self.pool.grant(self.handle, admitted_by, *rest)
        return answer

    def append(
        self, *rows: tuple[int, int, int, Sequence[int], int], checkpoints: Sequence[int] = ()
    ) -> Rows:
        """Append. Rows: id, first position, slots, tokens, lookahead slots. ``checkpoints``: the
        position of each row's, 0 for none; empty: no row has one.
        """
        more = {"checkpoints": i32(checkpoints)} if any(checkpoints) else {}
        return _rows(self.pool.append(self.handle, *_append_columns(rows), **more))

    def append_if_sure(self, *rows: tuple[int, int, int, Sequence[int], int]) -> Rows | None:
        """``append``, if its columns say that there is room."""
        done = self.pool.append(self.handle, *_append_columns(rows), only_if_sure=True)
        return None if done is None else _rows(done)

    def truncate(self, *rows: tuple[int, int]) -> Rows:
        """Truncate. Rows: id, tokens that stay."""
        ids, counts = [row[0] for row in rows], [row[1] for row in rows]
        return _rows(self.pool.truncate(self.handle, i64(ids), i32(counts)))

    def fork(self, *rows: tuple[int, int]) -> Rows:
        """Fork. Rows: parent, child."""
        parents, ids = [row[0] for row in rows], [row[1] for row in rows]
        return _rows(self.pool.fork(self.handle, i64(parents), i64(ids)))

    def free(self, *ids: int) -> Rows:
        return _rows(self.pool.free(self.handle, i64(ids)))

    def swap(self, ids: Sequence[int], tier: int) -> int | Failure:
        """Swap; return the blocks moved, every other time some at once, or the failure."""
        most = 1 << 40 if self.number % 2 else FEW_BLOCKS
        answer: int | Failure | None = self.pool.swap(self.handle, i64(ids), tier, 0, most)
        while answer is None:
            self.check_some()
            answer = self.pool.swap_some(self.handle, FEW_BLOCKS)
        return answer

    # What follows

    def receipted(self, plan: int | None = None) -> None:
        """Note that the plan, by default the last one, has run."""
        plan = self.pool.last_plan(self.handle) if plan is None else plan
        if plan % 2:
            self.pool.receipted(self.handle, plan)
        while self.pool.receipted(self.handle, plan, FEW_BLOCKS):
            self.check_some()

    def abort(self, *, keeps_tables: bool = True) -> None:
        """Abort all plans in flight, every other time some blocks at once; takes a number."""
        self.number += 1
        most = FEW_BLOCKS if self.number % 2 else 1 << 40
        while self.pool.abort(self.handle, self.number, keeps_tables, most):
            self.check_some()

    def deferred(self, *rows: tuple[int, int, int, Sequence[int]]) -> Failure | None:
        """Submit deferred tokens. Rows: id, the step that admitted it, first position, tokens."""
        answer: Failure | None = self.pool.deferred_tokens(
            self.handle,
            i64(row[0] for row in rows),
            i64(row[1] for row in rows),
            i32(row[2] for row in rows),
            i32(len(row[3]) for row in rows),
            i32(token for row in rows for token in row[3]),
        )
        return answer


def with_prompt(
    tokens: Sequence[int] = PROMPT, num_device: int = 8, num_host: int = 8, **options: int
) -> Caller:
    """Return the session of a new pool with sequence 1, which is written."""
    caller = Caller(new_pool(num_device, num_host, **options))
    with caller.step():
        assert len(caller.admit(1, tokens)) == 3
    return caller


class _Checks:
    """Checks a pool's operations as those of a step, without running them."""

    def __init__(self, pool: Any, number: int) -> None:
        self._pool, self._number = pool, number

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._pool, name), check_as=self._number)


def _append_columns(rows: Sequence[tuple[int, int, int, Sequence[int], int]]) -> tuple[bytes, ...]:
    ahead = [row[4] for row in rows]
    return (
        i64(row[0] for row in rows),
        i32(row[1] for row in rows),
        i32(row[2] for row in rows),
        i32(len(row[3]) for row in rows),
        i32(token for row in rows for token in row[3]),
        i32(ahead) if any(ahead) else b"",
    )


def _rows(answer: tuple[bytes, list[Failure] | None]) -> Rows:
    values, failures = answer
    return ints(values, "i"), failures or []


def dump(pool: OneGroup, callers: Iterable[View]) -> tuple[Any, ...]:
    """Return the results of all queries."""
    return (
        [pool.usage(tier) for tier in (DEVICE, HOST)],
        [pool.generations(tier) for tier in (DEVICE, HOST)],
        pool.counters(),
        pool.revision,
        sorted(publications(pool)),
        [
            (
                caller.states(),
                [caller.table(state.sequence_id) for state in caller.states()],
                [pool.num_obtainable(caller.handle, tier) for tier in (DEVICE, HOST)],
                [pool.num_pending(caller.handle, tier) for tier in (DEVICE, HOST)],
                pool.plans_in_flight(caller.handle),
                pool.num_blocks_held(caller.handle),
                pool.resync_due(caller.handle),
            )
            for caller in callers
        ],
    )
