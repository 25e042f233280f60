"""The data plane's metadata of its own memory: block tables, generations, reference counts and
publications.

    session ── group ── sequence ── Table(tier_key, blocks, generations, num_trimmed)
                                                    │
    tier     ── block ── generation          ref_count, stale_count: table entries that refer to it
                   └─ publication         (device tier only; dropped when the block is allocated)

A tier key names one tier of one layer group (``data_plane/tier_keys.py``).

Plans change all this inside ``transaction``, which undoes the changes when an exception is raised.
``ref_counts`` counts the entries of a block's present generation. An entry is stale when its block
has been allocated again: the control plane has taken the sequence away, and its session's next plan
drops the table. Code that uses a table first checks that it has none (``first_stale``).

A table is never changed in place, so tables may share arrays, and keeping a former one for undo is
free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.plan_columns import Mask, ints, refuse
from data_plane.tier_keys import TierKey, group_of, tier_key_of, tier_of
from kvplane.errors import InternalError, InvalidRequestError, SequenceNotFoundError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as pb

Array: TypeAlias = NDArray[Any]
_VERSION = attrgetter("version")  # of publications; each layer of each step asks for it


_HASH_BYTES = 16
_MAX_SCOPE_CHARACTERS = 256
Scope = tuple[str, str, str]
"""The tenant, the namespace and the hash algorithm that publications share."""


Parts: TypeAlias = list[rpb.BlockReport]


@dataclass(eq=False, slots=True)
class Table:
    """A sequence's blocks of one layer group, all in one tier. Immutable, so it is shared."""

    tier_key: TierKey
    blocks: NDArray[np.int32]
    """[num_blocks]: the index of each block in its tier."""
    generations: NDArray[np.int64]
    """[num_blocks]: the generation of each block."""
    num_trimmed: int = 0
    """Leading entries that were dropped, as no later position needs them. Their block and
    generation are 0, a valid id: kernels may be passed more of a table than they need.
    """
    has_holes: bool = False
    """True if later entries may have no block either, as in a table of states. They are 0 too."""

    def part(self, begin: int, end: int) -> Table:
        """Return a table of the entries [begin, end), without the trimmed ones."""
        held = slice(max(begin, self.num_trimmed), end)
        return Table(
            self.tier_key, self.blocks[held], self.generations[held], has_holes=self.has_holes
        )

    def at(self, entries: NDArray[np.int64]) -> Table:
        """Return a table of some entries, none of them trimmed, in the order given."""
        return Table(self.tier_key, self.blocks[entries], self.generations[entries])

    def copy(self) -> Table:
        """Return a table of the same entries that shares no memory with this one."""
        return replace(self, blocks=self.blocks.copy(), generations=self.generations.copy())

    @property
    def held(self) -> Table:
        """The table without its trimmed entries, and those that have no block."""
        if self.has_holes:
            return self.at(np.flatnonzero(self.generations))
        return self.part(0, len(self.blocks)) if self.num_trimmed else self


@dataclass(slots=True)
class _Before:
    """Values before a transaction of everything that it has changed, for undoing it."""

    num_stale: dict[TierKey, int]
    tables: dict[tuple[int, int, int], Table | None] = field(default_factory=dict)
    elements: list[tuple[Array, Array, Array]] = field(default_factory=list)
    """The array, the indices and the former values of each change, in order."""


class Publications:
    """The publications of one layer group, kept for the next control plane: one row of arrays for
    each block of its device tier. Not thread-safe: the executor's lock guards it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        group: int = 0,
        num_parents: int | None = None,
    ) -> None:
        """``num_parents``: the blocks of the group that parents are in; None: of this one."""
        self._num_parents = num_blocks if num_parents is None else num_parents
        self.published: Mask = np.zeros(num_blocks, np.bool_)
        """[num_blocks]: whether the block's present generation was published."""
        self.version = 0
        """Counts the messages that published a block, which make earlier checks outdated."""
        self.on_keep: Callable[[], None] = lambda: None
        """Called when some publications were kept."""
        self._group = group
        self._block_size_tokens = block_size_tokens
        self._parents = np.zeros(num_blocks, np.int32)
        self._parent_generations = np.zeros(num_blocks, np.int64)
        self._hashes = np.zeros((num_blocks, _HASH_BYTES), np.uint8)
        self._token_ids = np.zeros((num_blocks, block_size_tokens), np.int32)
        # The latest generation whose publication was dropped: it may still be on its way again.
        self._withdrawn = np.zeros(num_blocks, np.int64)
        # The order in which blocks were last published.
        self._order = np.zeros(num_blocks, np.int64)
        self._next_order = 0
        self._scope_of_block = np.zeros(num_blocks, np.int64)
        self._scopes: dict[Scope, int] = {}
        self._next_scope = 0
        self._prune_at = 64

    def __len__(self) -> int:
        return int(np.count_nonzero(self.published))

    def keep(
        self, message: plan_pb2.Publications, generations: NDArray[np.int64], field: str
    ) -> int:
        """Record the publications of blocks that still have their generation and were not
        withdrawn, and ignore the others. ``generations``: the present one of each block. Returns
        the number recorded.

        Raises InvalidRequestError naming the part of ``field`` at fault, and records nothing then.
        """
        indices, parents, parent_generations, present = self._check(message, generations, field)
        blocks = indices[present]
        num_kept = len(blocks)
        if num_kept == 0:
            return 0
        hashes = np.frombuffer(message.hashes, np.uint8).reshape(-1, _HASH_BYTES)
        token_ids = np.frombuffer(message.token_ids, "<i4").reshape(-1, self._block_size_tokens)
        self._parents[blocks] = parents[present]
        self._parent_generations[blocks] = parent_generations[present]
        self._hashes[blocks] = hashes[present]
        self._token_ids[blocks] = token_ids[present]
        self._order[blocks] = np.arange(self._next_order, self._next_order + num_kept)
        self._next_order += num_kept
        scope = (message.tenant, message.namespace, message.hash_algorithm)
        self._scope_of_block[blocks] = self._number_of(scope)
        self.published[blocks] = True
        self.version += 1
        self.on_keep()
        return num_kept

    def withdraw(
        self, message: rpb.WithdrawBlocks, generations: NDArray[np.int64], field: str
    ) -> int:
        """Drop the publications of blocks that have the given generation or an earlier one, and
        ignore the others. ``generations``: the present one of each block. Returns the number
        dropped.

        Raises InvalidRequestError naming the part of ``field`` at fault, and drops nothing then.
        """
        indices, own = self._check_blocks(message.indices, message.generations, field)
        blocks = indices[(own >= generations[indices]) & self.published[indices]]
        self.published[blocks] = False
        np.maximum.at(self._withdrawn, indices, own)
        return len(blocks)

    def contents(self, blocks: NDArray[np.int32]) -> tuple[Scope, NDArray[np.int32]]:
        """Return the scope of published blocks, which must all have the same, and their tokens
        [num_blocks, block_size_tokens].
        """
        number = self._scope_of_block[blocks[0]]
        scope = next(scope for scope, n in self._scopes.items() if n == number)
        return scope, self._token_ids[blocks]

    def children(
        self, parents: NDArray[np.int32], generations: NDArray[np.int64]
    ) -> dict[int, int]:
        """Return a published block of each parent that has one, by the parent's place in the
        arrays.
        """
        found = np.flatnonzero(self.published)
        found = found[np.isin(self._parents[found], parents)]
        keys = zip(
            self._parents[found].tolist(), self._parent_generations[found].tolist(), strict=True
        )
        block_of = dict(zip(keys, found.tolist(), strict=True))
        wanted = enumerate(zip(parents.tolist(), generations.tolist(), strict=True))
        return {place: block_of[key] for place, key in wanted if key in block_of}

    def report(
        self, generations: NDArray[np.int64], blocks_per_message: int
    ) -> Iterator[plan_pb2.Publications]:
        """Yield all publications by scope, in their order of arrival. ``generations``: the present
        one of each block.
        """
        blocks = np.flatnonzero(self.published)
        blocks = blocks[np.argsort(self._order[blocks])]
        numbers = self._scope_of_block[blocks]
        of_number = {number: scope for scope, number in self._scopes.items()}
        for number in np.unique(numbers).tolist():
            tenant, namespace, hash_algorithm = of_number[number]
            of_scope = blocks[numbers == number]
            for begin in range(0, len(of_scope), blocks_per_message):
                part = of_scope[begin : begin + blocks_per_message]
                yield plan_pb2.Publications(
                    group=self._group,
                    tenant=tenant,
                    namespace=namespace,
                    hash_algorithm=hash_algorithm,
                    indices=part.astype("<i4").tobytes(),
                    generations=generations[part].astype("<i8").tobytes(),
                    parent_indices=self._parents[part].astype("<i4").tobytes(),
                    parent_generations=self._parent_generations[part].astype("<i8").tobytes(),
                    hashes=self._hashes[part].tobytes(),
                    token_ids=self._token_ids[part].astype("<i4").tobytes(),
                )

    def _check(
        self, message: plan_pb2.Publications, generations: NDArray[np.int64], field: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Mask]:
        """Check a message of publications. Returns indices, parents' indices and generations, and
        which blocks still have the publication's generation, not withdrawn.
        """
        for name in ("tenant", "namespace", "hash_algorithm"):
            if len(getattr(message, name)) > _MAX_SCOPE_CHARACTERS:
                raise InvalidRequestError(
                    f"must be at most {_MAX_SCOPE_CHARACTERS} characters", field=f"{field}.{name}"
                )
        indices, own = self._check_blocks(message.indices, message.generations, field)
        num = len(indices)
        parents = ints(columns.INT32, message.parent_indices, f"{field}.parent_indices", num)
        parent_generations = ints(
            columns.INT64, message.parent_generations, f"{field}.parent_generations", num
        )
        refuse(
            (parents < -1) | (parents >= self._num_parents),
            InvalidRequestError,
            lambda i: f"{_no_block(parents[i], self._num_parents)}, and -1 stands for no parent",
            f"{field}.parent_indices",
        )
        refuse(
            (parents < 0) != (parent_generations == 0),
            InvalidRequestError,
            lambda i: "must be at least 1 for a parent, and 0 where there is no parent",
            f"{field}.parent_generations",
        )
        refuse(
            parent_generations < 0,
            InvalidRequestError,
            _too_low,
            f"{field}.parent_generations",
        )
        for name, size in (("hashes", _HASH_BYTES), ("token_ids", 4 * self._block_size_tokens)):
            if len(getattr(message, name)) != num * size:
                raise InvalidRequestError(
                    f"must have {size} bytes for each of {num} blocks, has "
                    f"{len(getattr(message, name))} bytes in all",
                    field=f"{field}.{name}",
                )
        present = (own == generations[indices]) & (own > self._withdrawn[indices])
        return indices, parents, parent_generations, present

    def _check_blocks(
        self, indices: bytes, generations: bytes, field: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Parse and check columns of blocks and generations. Returns both."""
        blocks = ints(columns.INT32, indices, f"{field}.indices")
        own = ints(columns.INT64, generations, f"{field}.generations", len(blocks))
        refuse(
            (blocks < 0) | (blocks >= len(self.published)),
            InvalidRequestError,
            lambda i: _no_block(blocks[i], len(self.published)),
            f"{field}.indices",
        )
        refuse(own < 1, InvalidRequestError, _too_low, f"{field}.generations")
        return blocks, own

    def _number_of(self, scope: Scope) -> int:
        number = self._scopes.get(scope)
        if number is None:
            if len(self._scopes) >= self._prune_at:
                self._prune()
            number = self._scopes[scope] = self._next_scope
            self._next_scope += 1
        return number

    def _prune(self) -> None:
        """Drop the scopes in which no block is published any more."""
        used = set(self._scope_of_block[self.published].tolist())
        self._scopes = {scope: n for scope, n in self._scopes.items() if n in used}
        self._prune_at = max(64, 2 * len(self._scopes))


def _no_block(block: int, num_blocks: int) -> str:
    return f"there is no block {block}: the device tier has blocks 0 to {num_blocks - 1}"


def _too_low(_: int) -> str:
    return "must be at least 1: generations count from 1"


class BlockTables:
    """The block tables of all sessions on one data plane, and the generations and reference counts
    of its blocks. Not thread-safe: the executor's lock guards it.
    """

    def __init__(
        self,
        num_blocks: dict[TierKey, int],
        block_size_tokens: int,
        state_group: int | None = None,
        whole_group: int = 0,
    ) -> None:
        """``num_blocks``: the number of blocks of each tier. ``state_group``: the layer group whose
        tables have blocks for some entries only, and whose publications name blocks of
        ``whole_group``.
        """
        num_parents = {state_group: num_blocks[tier_key_of(whole_group, pb.TIER_DEVICE)]}
        self.state_group = state_group
        self.num_blocks = dict(num_blocks)
        self.block_size_tokens = block_size_tokens
        self.generations = {tier_key: np.zeros(n, np.int64) for tier_key, n in num_blocks.items()}
        """[num_blocks] for each tier; 0 before a block was first allocated."""
        self.ref_counts = {tier_key: np.zeros(n, np.int32) for tier_key, n in num_blocks.items()}
        """[num_blocks] for each tier: table entries of the block's present generation."""
        self.stale_counts = {tier_key: np.zeros(n, np.int32) for tier_key, n in num_blocks.items()}
        """[num_blocks] for each tier: table entries of a former generation."""
        self.num_written = {tier_key: np.zeros(n, np.int32) for tier_key, n in num_blocks.items()}
        """[num_blocks] for each tier: leading slots written in the block's present generation; see
        ``written_slots``.
        """
        self.num_taken = 0
        """Counts the plans that made entries stale, which make earlier checks outdated."""
        self.publications = tuple(
            Publications(n, block_size_tokens, group, num_parents.get(group))
            for tier_key, n in num_blocks.items()
            for group in [group_of(tier_key)]
            if tier_of(tier_key) == pb.TIER_DEVICE
        )
        """Publications of each layer group."""
        self._num_stale = dict.fromkeys(num_blocks, 0)
        self._tables: dict[tuple[int, int], dict[int, Table]] = {}  # by session and group
        self._before: _Before | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences with tables, of all sessions."""
        return sum(len(self._tables.get((i, 0), {})) for i in self.session_ids())

    @property
    def num_groups(self) -> int:
        """Number of layer groups."""
        return len(self.publications)

    @property
    def num_messages_published(self) -> int:
        """How many messages have published a block. A new one makes earlier checks outdated."""
        return sum(map(_VERSION, self.publications))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo all changes made inside the context if it raises."""
        self._before = _Before(dict(self._num_stale))
        try:
            yield
        except BaseException:
            self._undo(self._before)
            raise
        finally:
            self._before = None

    def session_ids(self) -> list[int]:
        """Return the ids of the sessions that have tables."""
        return list(dict.fromkeys(session_id for session_id, _ in self._tables))

    def of_session(self, session_id: int, group: int = 0) -> Mapping[int, Table]:
        """Return the session's tables in a layer group by sequence."""
        return self._tables.get((session_id, group), {})

    def get(self, session_id: int, sequence_id: int, field: str, group: int = 0) -> Table:
        """Return a sequence's table. Raises SequenceNotFoundError naming ``field``."""
        table = self.of_session(session_id, group).get(sequence_id)
        if table is None:
            raise SequenceNotFoundError(no_table(sequence_id), field=field)
        return table

    def put(self, session_id: int, sequence_id: int, table: Table | None, group: int = 0) -> None:
        """Set a sequence's table; None removes it. The caller updates the reference counts."""
        key = session_id, group
        tables = self._tables.setdefault(key, {})
        if self._before is not None:
            self._before.tables.setdefault((*key, sequence_id), tables.get(sequence_id))
        if table is not None:
            tables[sequence_id] = table
            return
        tables.pop(sequence_id, None)
        if not tables:
            del self._tables[key]

    def first_stale(self, tables: Sequence[Table]) -> int | None:
        """Return the index of the first of ``tables``, all of one tier, with a stale entry."""
        if not tables or not self._num_stale[tier_key := tables[0].tier_key]:
            return None
        stale = self.stale_counts[tier_key]
        if not stale[np.concatenate([table.blocks for table in tables])].any():
            return None
        present = self.generations[tier_key]
        for i, table in enumerate(tables):
            held = table.held
            if (held.generations != present[held.blocks]).any():
                return i
        return None

    def add_references(self, tier_key: TierKey, tables: Mapping[Table, int]) -> None:
        """Add the entries of tables of one tier to the reference counts, each with its table's
        weight, which is negative to subtract them.
        """
        of_weight: dict[int, list[Table]] = {}
        for table, weight in tables.items():
            if weight:
                of_weight.setdefault(weight, []).append(table.held)
        for weight, parts in of_weight.items():
            blocks = np.concatenate([part.blocks for part in parts])
            generations = np.concatenate([part.generations for part in parts])
            is_stale = generations != self.generations[tier_key][blocks]
            if is_stale.any():
                self._add(self.stale_counts[tier_key], blocks[is_stale], weight)
                self._num_stale[tier_key] += weight * int(np.count_nonzero(is_stale))
                blocks = blocks[~is_stale]
            self._add(self.ref_counts[tier_key], blocks, weight)

    def allocate(self, tier_key: TierKey, blocks: Array, generations: Array) -> None:
        """Set new generations of blocks: entries that refer to them are stale from now on, and
        their publications are dropped. ``blocks``: ascending; where one is listed twice, its last
        generation counts.
        """
        self._set(self.generations[tier_key], blocks, generations)
        self._set(self.num_written[tier_key], blocks, 0)
        if tier_of(tier_key) == pb.TIER_DEVICE:
            self._set(self.publications[group_of(tier_key)].published, blocks, False)
        num_entries = self.ref_counts[tier_key][blocks]
        if num_entries.any():
            stale = self.stale_counts[tier_key]
            self._set(stale, blocks, stale[blocks] + num_entries)
            self._set(self.ref_counts[tier_key], blocks, 0)
            self._num_stale[tier_key] += int(num_entries[np.diff(blocks, prepend=-1) > 0].sum())
            self.num_taken += 1

    def drop_session(self, session_id: int) -> None:
        """Remove all tables of a session."""
        for group in range(self.num_groups):
            tables = Counter(self._tables.pop((session_id, group), {}).values())
            for tier_key in {table.tier_key for table in tables}:
                of_tier = {t: -num for t, num in tables.items() if t.tier_key == tier_key}
                self.add_references(tier_key, of_tier)

    def drop_all(self) -> None:
        """Remove all tables of all sessions, but keep generations and publications."""
        self._tables.clear()
        for counts in (*self.ref_counts.values(), *self.stale_counts.values()):
            counts[:] = 0
        self._num_stale = dict.fromkeys(self.num_blocks, 0)

    def check_integrity(self) -> None:
        """Check that reference counts, generations and tables agree. Raises InternalError."""
        counted = {
            tier_key: (np.zeros(n, np.int32), np.zeros(n, np.int32))
            for tier_key, n in self.num_blocks.items()
        }
        for (session_id, group), tables in self._tables.items():
            _require(bool(tables), f"session {session_id}: an empty set of tables")
            for sequence_id, table in tables.items():
                at = f"session {session_id}, group {group}, sequence {sequence_id}"
                _require(group_of(table.tier_key) == group, f"{at}: in another group's memory")
                self._check_table(table, at)
                held = table.held
                stale = held.generations != self.generations[table.tier_key][held.blocks]
                for counts, of_kind in zip(counted[table.tier_key], (~stale, stale), strict=True):
                    np.add.at(counts, held.blocks[of_kind], np.int32(1))
        for tier_key, (current, stale) in counted.items():
            same = np.array_equal(current, self.ref_counts[tier_key])
            _require(same, f"tier {tier_key}: the reference counts are not those of the tables")
            same = np.array_equal(stale, self.stale_counts[tier_key])
            same &= int(stale.sum()) == self._num_stale[tier_key]
            _require(
                same,
                f"tier {tier_key}: the counts of stale entries are not those of the tables",
            )
        for group, publications in enumerate(self.publications):
            present = self.generations[tier_key_of(group, pb.TIER_DEVICE)]
            is_known = bool((present[publications.published] > 0).all())
            _require(is_known, "a published block was never allocated")
        _require(self._before is None, "a transaction is open")

    def _check_table(self, table: Table, at: str) -> None:
        blocks, generations, num_trimmed = table.blocks, table.generations, table.num_trimmed
        _require(len(blocks) == len(generations), f"{at}: columns of unequal length")
        known = (blocks >= 0) & (blocks < self.num_blocks[table.tier_key])
        _require(bool(known.all()), f"{at}: a block that is not there")
        _require(0 <= num_trimmed <= len(blocks), f"{at}: trimmed by more than it is long")
        hole = (*blocks[:num_trimmed].tolist(), *generations[:num_trimmed].tolist())
        _require(not any(hole), f"{at}: a trimmed entry has a block")
        lacks = generations[num_trimmed:] == 0
        _require(table.has_holes or not lacks.any(), f"{at}: an entry has no block")
        held = table.held
        present = self.generations[table.tier_key][held.blocks]
        in_range = (held.generations >= 1) & (held.generations <= present)
        _require(bool(in_range.all()), f"{at}: a generation that is to come")

    def _add(self, array: Array, indices: Array, num: int) -> None:
        self._remember(array, indices)
        np.add.at(array, indices, array.dtype.type(num))  # a Python int would be 40 times slower

    def _set(self, array: Array, indices: Array, values: Any) -> None:
        self._remember(array, indices)
        array[indices] = values

    def _remember(self, array: Array, indices: Array) -> None:
        if self._before is not None:
            self._before.elements.append((array, indices, array[indices]))

    def _undo(self, before: _Before) -> None:
        self._before = None
        self._num_stale = before.num_stale
        for (session_id, group, sequence_id), table in before.tables.items():
            self.put(session_id, sequence_id, table, group)
        for array, indices, values in reversed(before.elements):
            array[indices] = values


def block_report(tables: BlockTables, blocks_per_part: int) -> Parts:
    """Return a report of the state of the blocks, which a control plane needs before it plans:
    generations of all blocks that were ever allocated, then all publications; up to
    ``blocks_per_part`` in a part. There is at least one part; the last one has ``last`` set.
    """
    parts = []
    for tier_key, generations in tables.generations.items():
        allocated = np.flatnonzero(generations > 0)
        for begin in range(0, len(allocated), blocks_per_part):
            of_part = allocated[begin : begin + blocks_per_part]
            blocks = pb.Blocks(
                group=group_of(tier_key),
                tier=tier_of(tier_key),
                indices=of_part.astype("<i4").tobytes(),
                generations=generations[of_part].astype("<i8").tobytes(),
            )
            parts.append(rpb.BlockReport(blocks=[blocks]))
    for group, publications in enumerate(tables.publications):
        present = tables.generations[tier_key_of(group, pb.TIER_DEVICE)]
        parts += [
            rpb.BlockReport(publications=[message])
            for message in publications.report(present, blocks_per_part)
        ]
    if not parts:
        parts.append(rpb.BlockReport())
    parts[-1].last = True
    return parts


def no_table(sequence_id: int) -> str:
    """Return the error message for a sequence without a table."""
    return (
        f"sequence {sequence_id} has no block table here: it was freed, or the plan that admits "
        "it has not been started"
    )


def taken_away(sequence_id: int) -> str:
    """Return the error message for a sequence whose table has a stale entry."""
    return (
        f"blocks of sequence {sequence_id} have been allocated again: the control plane has taken "
        "the sequence away, or another plan of the session has yet to be started"
    )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InternalError(message)
