"""A data plane of the native core's plans: it runs them, late or halfway, and keeps what each slot
holds.

Instead of keys and values a slot holds the hash of the whole prefix that it was computed from. So a
span sees whether every slot that it reads holds its own prefix. A wrong plan is an AssertionError,
never a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.helpers.native.native_pool import DEVICE, Kind, MadePlan, Ref, Span

Place = tuple[int, int]
Table = list[Ref | None]


def values_of(tokens: Iterable[int], start: int) -> list[int]:
    """Return each position's value, computed from all tokens up to it, after ``start``."""
    values = []
    for token in tokens:
        start = hash((start, token))
        values.append(start)
    return values


def changed(before: dict[int, Table], plan: MadePlan) -> dict[int, Table]:
    """Return the tables of a session after the changes of a plan."""
    tables = {} if plan.resync else dict(before)
    for change in plan.changes:
        old = tables.get(change.sequence_id)
        new: Table
        if change.kind == Kind.SET:
            new = list(old or [])
            num_trimmed = next((i for i, ref in enumerate(new) if ref), len(new))
            assert num_trimmed <= change.first <= len(new), "a hole, or a trimmed entry is set"
            assert not any(ref and ref.tier != change.tier for ref in new), "in two tiers"
            new[change.first : change.first + change.num] = change.blocks
        elif change.kind == Kind.REPLACE:
            new = [None] * change.first + list(change.blocks)
        elif change.kind == Kind.KEEP:
            assert plan.resync and old is None and change.num <= len(before[change.sequence_id])
            new = before[change.sequence_id][: change.num]
        elif change.kind == Kind.FORK:
            assert old is None, "a fork over a live table"
            parent = tables[change.parent_id]
            assert change.num <= len(parent)
            new = parent[: change.num]
        else:
            assert old is not None, f"{Kind(change.kind).name} of no table"
            if change.kind == Kind.DROP:
                del tables[change.sequence_id]
                continue
            assert change.num <= len(old), f"{Kind(change.kind).name} beyond the end"
            if change.kind == Kind.TRUNCATE:
                new = old[: change.num]
            else:
                new = [None] * change.num + old[change.num :]
        tables[change.sequence_id] = new
    return tables


def allocated_by(plan: MadePlan) -> list[Ref]:
    """Return the blocks that a plan allocates."""
    blocks = list(plan.allocations)
    for change in plan.changes:
        blocks += [
            ref
            for ref, is_new in zip(change.blocks, change.allocated, strict=True)
            if is_new and ref is not None
        ]
    return blocks


@dataclass
class Running:
    """A plan that was started. Started again it continues: no transfer is made twice."""

    number: int
    before: dict[int, Table]
    num_copied: int = 0
    # What blocks held before the plan allocated them: (generation, content), until it writes them.
    former: dict[Place, tuple[int, list[int | None]]] = field(default_factory=dict)


class Plane:
    """One shard's blocks, and the tables of its sessions."""

    def __init__(self, block_size: int, window: int, *, states: bool = False) -> None:
        self.block_size, self.window, self.states = block_size, window, states
        self.generation: dict[Place, int] = {}
        self.content: dict[Place, list[int | None]] = {}
        self.published: dict[Place, int] = {}  # generation
        self.tables: dict[int, dict[int, Table]] = {}
        self.finished: dict[int, int] = {}
        self.running: dict[int, Running] = {}
        self.quit: set[int] = set()

    def fence(self, session: int) -> None:
        """Fence the session, which touches nothing any more."""
        self.quit.add(session)
        self.tables.pop(session, None)

    def publish(self, block: int, generation: int, parent: Ref | None, tokens: Sequence[int],
                root: int, whole: Plane) -> None:  # fmt: skip
        """Take a publication: the block must hold the published contents. A parent of states is a
        block of the same prefix in ``whole``.
        """
        place = (DEVICE, block)
        assert self.generation.get(place) == generation, "a block is published that never was"
        start: int | None = root
        if parent is not None:
            named = whole if self.states else self
            assert named.generation[parent.place] == parent.generation
            start = named.content[parent.place][-1]
            assert start is not None, "the parent is not written"
        wanted = values_of(tokens, start or 0)
        if self.states:
            wanted = [start] * self.block_size
        assert self.content[place] == wanted, f"{place} is published and holds something else"
        self.published[place] = generation

    def withdraw(self, block: int, generation: int) -> None:
        """Void the block's publication; the block was published, or allocated again."""
        place = (DEVICE, block)
        if self.published.get(place) == generation:
            del self.published[place]

    def run(self, session: int, plan: MadePlan, halfway: Random | None = None) -> bool:
        """Start a plan, or resume it. Return False when it is refused, or stopped ``halfway``."""
        last = self.finished.get(session, 0)
        running = self.running.get(session)
        number = running.number if running else 0
        if session in self.quit or plan.number <= last or plan.number < number:
            return False
        if not plan.resync and plan.previous != last:
            return False
        again = number == plan.number
        if running is None or not again:
            running = Running(plan.number, self.tables.get(session, {}))
        self.running[session] = running
        self._allocate(plan, running, again=again)
        assert plan.finished <= last, "tables of a plan that has not run are kept"
        tables = changed(running.before, plan)
        self.tables[session] = tables
        for table in tables.values():
            for ref in filter(None, table):
                assert self.generation[ref.place] == ref.generation, f"a stale {ref} in a table"
        transfers = plan.transfers[running.num_copied :]
        for source, destination in transfers[: halfway.randint(0, 9) if halfway else None]:
            self._copy(source, destination, running)
            running.num_copied += 1
        spans = plan.spans[: halfway.randint(0, 9) if halfway else None]
        if running.num_copied == len(plan.transfers):
            for span in spans:
                table, values = tables.get(span.sequence_id, []), plan.expected[span.sequence_id]
                write = self._write_states if self.states else self._write
                write(table, span, values, running)
        if halfway:
            return False
        for span in spans:
            values = plan.expected[span.sequence_id]
            if self.states:
                wrong = self.wrong_states(tables.get(span.sequence_id, []), values)
                assert not wrong, f"sequence {span.sequence_id}: states of other prefixes {wrong}"
            else:
                self._read(tables[span.sequence_id], span, values)
        self.finished[session] = plan.number
        return True

    def holds(self, table: Table, values: Sequence[int], num: int) -> bool:
        """Return whether the visible ones of the table's first positions hold the values."""
        if self.states:
            return len(table) * self.block_size <= num and not self.wrong_states(table, values)
        first = max(0, num - self.window + 1) if self.window else 0
        return all(self._at(table, i) == values[i] for i in range(first, num))

    def wrong_states(self, table: Table, values: Sequence[int]) -> list[int]:
        """Return the entries of a table whose checkpoint is not that of the prefix there."""
        size = self.block_size
        ends = [(i, values[(i + 1) * size - 1]) for i, ref in enumerate(table) if ref is not None]
        return [i for i, value in ends if self._at(table, i * size) != value]

    def _at(self, table: Table, position: int) -> int | None:
        ref = table[position // self.block_size]
        assert ref is not None, f"position {position} was trimmed"
        assert self.generation[ref.place] == ref.generation, f"{ref} was allocated again"
        return self.content[ref.place][position % self.block_size]

    def _allocate(self, plan: MadePlan, running: Running, *, again: bool) -> None:
        new = allocated_by(plan)
        for ref in new:
            known = self.generation.get(ref.place, 0)
            if again and ref.generation <= known:
                continue
            assert ref.generation > known, f"{ref} is not new: {known}"
            old = self.content.get(ref.place, [])
            running.former.setdefault(ref.place, (known, old))
            self.generation[ref.place] = ref.generation
            self.content[ref.place] = [None] * self.block_size
            self.published.pop(ref.place, None)
        places = {ref.place for ref in new}  # a table may have had a former generation until now
        for change in plan.changes:
            for ref in filter(None, change.blocks):
                known = self.generation.get(ref.place, 0)
                is_known = ref.generation <= known if ref.place in places else None
                assert is_known or ref.generation == known, f"{ref} is not allocated: {known}"

    def _copy(self, source: Ref, destination: Ref, running: Running) -> None:
        known = self.generation.get(destination.place)
        assert known == destination.generation, f"a transfer to {destination}, which is {known}"
        assert destination.place not in self.published, "a copy over a published block"
        known, content = self.generation.get(source.place), self.content.get(source.place, [])
        if known != source.generation:
            known, content = running.former.get(source.place, (known, []))
        assert known == source.generation, f"a transfer of {source}, which is {known}"
        running.former.pop(destination.place, None)
        self.content[destination.place] = list(content)

    def _write(self, table: Table, span: Span, values: Sequence[int], running: Running) -> None:
        for position in range(span.first, span.first + span.num):
            ref = table[position // self.block_size]
            assert ref is not None and ref.tier == DEVICE, f"a write to {ref}"
            assert self.generation[ref.place] == ref.generation, f"{ref} was allocated again"
            assert ref.place not in self.published, f"a write to a published block: {ref}"
            running.former.pop(ref.place, None)
            self.content[ref.place][position % self.block_size] = values[position]

    def _write_states(
        self, table: Table, span: Span, values: Sequence[int], running: Running
    ) -> None:
        """Write the checkpoints that lie in the span, each whole."""
        size = self.block_size
        for i in range(span.first // size, min(len(table), (span.first + span.num) // size)):
            if (ref := table[i]) is None:
                continue
            assert ref.tier == DEVICE and ref.place not in self.published, f"a write to {ref}"
            assert self.generation[ref.place] == ref.generation, f"{ref} was allocated again"
            running.former.pop(ref.place, None)
            self.content[ref.place] = [values[(i + 1) * size - 1]] * size

    def _read(self, table: Table, span: Span, values: Sequence[int]) -> None:
        first = max(0, span.first - self.window + 1) if self.window else 0
        for position in range(first, span.first + span.num):
            found = self._at(table, position)
            assert found == values[position], (
                f"sequence {span.sequence_id} reads another token at {position}"
            )
