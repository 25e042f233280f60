"""Engines on one native pool, with their views of it: the naive model of the walk.

Written from the statements of docs/internals.md ("What always holds"), not from the core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kvplane_blocks._native import (
    FAMILY_ENDED_ON_HOST,
    FAMILY_LEFT_DEVICE,
    FAMILY_STARTED,
    LayerGroup,
    Pool,
)

from tests.helpers.native.native_plane import Place, Plane, Table, allocated_by, changed, values_of
from tests.helpers.native.native_pool import (
    DEVICE,
    HOST,
    Caller,
    MadePlan,
    OneGroup,
    Ref,
    Span,
    State,
    View,
    dump,
    find,
    i32,
    i64,
    ints,
)

Touched = tuple[int, Place]
"""Layer group and place."""


@dataclass(frozen=True)
class Group:
    """A layer group's blocks, and its window in tokens, 0 for none. ``states``: whether its blocks
    are checkpoints.
    """

    num_device: int
    num_host: int
    window: int = 0
    states: bool = False


@dataclass
class Known:
    """An engine's view of a sequence. ``tokens``: of all scheduled positions, and those known
    beyond; the core knows the first ``num_known``.
    """

    tokens: list[int]
    num_known: int
    num_scheduled: int
    admitted_by: int
    tier: int = DEVICE

    def copy(self, admitted_by: int) -> Known:
        return dataclasses.replace(self, tokens=list(self.tokens), admitted_by=admitted_by)

    def truncate(self, num: int) -> None:
        """Shorten it to so many tokens, where it has more."""
        del self.tokens[num:]
        self.num_known = min(self.num_known, num)
        self.num_scheduled = min(self.num_scheduled, num)


@dataclass
class Issued:
    """A plan, and every block that it may touch."""

    plan: MadePlan
    touches: set[Touched] = field(default_factory=set)


class Engine:
    """One session of the world."""

    def __init__(self, world: World, root: bytes) -> None:
        self.world = world
        self.caller = Caller(world.pool, root, owner=root[0])  # distinct for the roots in use
        self.views = [View(core, self.caller.handle) for core in world.cores]
        self.id = world.num_sessions = world.num_sessions + 1
        self.start = hash(root)
        self.sequences: dict[int, Known] = {}
        self.queue: list[Issued] = []  # issued, not known to have run
        self.voided: list[Issued] = []  # aborted; they may run until whole tables have
        # By group, as they are once all plans have run.
        self.tables: list[dict[int, Table]] = [{} for _ in world.cores]
        self.families: dict[int, bool] = {}  # by events: whether each holds device blocks
        self.has_draft = False  # a grant or a cut waits for the next plan
        self.has_ended = False

    def finish(self) -> None:
        """End the step, and check its plan against all that is in flight."""
        made = self.caller.finish()
        self.world.take_publications()
        if made is None:
            return
        self.has_draft = False
        issued = Issued(made)
        for span in made.spans:
            known = self.sequences[span.sequence_id]
            made.expected[span.sequence_id] = values_of(
                known.tokens[: span.first + span.num], self.start
            )
        for group in range(len(self.views)):
            self._take(made.in_group(group), issued, group)
        self.queue.append(issued)

    def _take(self, made: MadePlan, issued: Issued, group: int) -> None:
        """Apply a plan in one group."""
        tables = self.tables[group] = changed(self.tables[group], made)
        places: set[Place] = set()
        for span in made.spans:
            places |= {ref.place for ref in tables.get(span.sequence_id, []) if ref}
            self._check_alone(made, span, group)
        for pair in made.transfers:
            places |= {ref.place for ref in pair}
        places |= {ref.place for ref in made.allocations}
        issued.touches |= {(group, place) for place in places}
        new = allocated_by(made)
        assert len(new) == len(set(new)), "a block is allocated twice at one generation"
        self.world.check_quiet(self, group, [ref.place for ref in new])
        for i, known in self.sequences.items():
            table = self.views[group].table(i)
            assert tables.get(i, []) == table, f"the plan's table of {i} differs"
            assert all(ref is None or ref.tier == known.tier for ref in table)

    def _check_alone(self, made: MadePlan, span: Span, group: int) -> None:
        """Check that nobody writes a slot in which another table has content."""
        size, table = self.world.block_size, self.tables[group].get(span.sequence_id, [])
        values = made.expected[span.sequence_id]
        for other in self.world.engines:
            for i, known in other.sequences.items():
                if (other, i) == (self, span.sequence_id):
                    continue
                shared = other.views[group].table(i)
                for block in range(span.first // size, len(table)):
                    if table[block] is None or table[block] not in shared:
                        continue
                    begin, end = max(span.first, block * size), min(len(values), (block + 1) * size)
                    assert other is self or begin >= end, f"{i} of another session loses content"
                    theirs = values_of(known.tokens[: known.num_scheduled], self.start)[begin:end]
                    assert theirs == values[begin : begin + len(theirs)], f"{i} loses content"

    def run_next(self) -> bool:
        """Run the first plan of the queue that the data plane has not run."""
        for issued in self.queue:
            if issued.plan.number > self.world.finished(self):
                return self.world.run(self, issued.plan)
        return False

    def run_all(self) -> None:
        while self.run_next():
            pass

    def receive(self, number: int | None = None) -> None:
        """Deliver receipts of plans up to ``number``: by default of all that have run."""
        done = self.world.finished(self)
        done = done if number is None else min(done, number)
        arrived = [issued for issued in self.queue if issued.plan.number <= done]
        if not arrived:
            return
        self.queue = [issued for issued in self.queue if issued.plan.number > done]
        last = max([i.plan.number for i in arrived if i.plan.resync], default=0)
        self.voided = [issued for issued in self.voided if issued.plan.number > last]
        self.caller.receipted(arrived[-1].plan.number)
        self.world.take_publications()

    def abort(self, *, keeps_tables: bool = True) -> None:
        """Abort everything in flight: only slots written by receipts stay."""
        before = {state.sequence_id: state for state in self.caller.states()}
        tables = [{i: view.table(i) for i in before} for view in self.views]
        self.caller.abort(keeps_tables=keeps_tables)
        self.voided += self.queue
        self.queue = []
        for state in self.caller.states():
            known, was = self.sequences[state.sequence_id], before[state.sequence_id]
            kept = min(was.num_written, was.num_tokens)
            for group, of_group in zip(self.world.groups, tables, strict=True):
                if group.states:
                    continue
                num_trimmed = of_group[state.sequence_id].count(None)
                fewest = num_trimmed * self.world.block_size + group.window - 1
                if num_trimmed and kept < fewest:
                    kept = 0  # the next position would see trimmed blocks
            assert state.num_tokens == state.num_scheduled == state.num_written == kept
            known.truncate(kept)
            known.tier = state.tier
        self.has_draft = False

    def end(self) -> None:
        self.caller.pool.end_session(self.caller.handle)
        self.has_ended = True
        self.sequences.clear()

    # Checks

    def check(self) -> None:
        """Check that the core agrees with this engine's view and the data plane's contents."""
        if self.has_ended:
            return
        states = self.caller.states()
        assert [state.sequence_id for state in states] == sorted(self.sequences)
        for view in self.views:
            in_step = [state._replace(num_blocks=0) for state in view.states()]
            assert in_step == [state._replace(num_blocks=0) for state in states]
        self._check_families(states)
        if self.world.has_states:
            self._check_checkpoints(states)
        is_quiet = not self.queue and not self.has_draft
        for state in states:
            known = self.sequences[state.sequence_id]
            self._check_state(state, known)
            if is_quiet:
                assert state.num_written == state.num_scheduled, f"a receipt was lost: {state}"
                values = values_of(known.tokens[: state.num_written], self.start)
                for view, plane in zip(self.views, self.world.planes, strict=True):
                    table = view.table(state.sequence_id)
                    assert plane.holds(table, values, state.num_written), (
                        f"sequence {state.sequence_id} of session {self.id} has lost its content"
                    )

    def _check_checkpoints(self, states: Sequence[State]) -> None:
        """Check that the deepest written checkpoint of each sequence is known."""
        size, ids = self.world.block_size, i64(state.sequence_id for state in states)
        positions = ints(self.world.pool.checkpoints(self.caller.handle, ids), "i")
        for state, position in zip(states, positions, strict=True):
            table = self.views[-1].table(state.sequence_id)
            ends = [(i + 1) * size for i, ref in enumerate(table) if ref is not None]
            assert position == max((end for end in ends if end <= state.num_written), default=0)

    def _check_families(self, states: Sequence[State]) -> None:
        """Check that the events tell which families there are, and which hold device blocks."""
        pool, handle = self.world.pool, self.caller.handle
        for change, family in pool.take_family_events(handle):
            before = self.families.pop(family, None)
            if change == FAMILY_STARTED:
                assert not before
            else:
                assert before is (change != FAMILY_ENDED_ON_HOST)
            if change in (FAMILY_STARTED, FAMILY_LEFT_DEVICE):
                self.families[family] = change == FAMILY_STARTED
        families: dict[int, list[int]] = {}
        for state in states:
            on_device = families.setdefault(pool.family_of(handle, state.sequence_id), [])
            on_device += [state.sequence_id] * (state.tier == DEVICE)
        for family, on_device in families.items():
            assert sorted(ints(pool.family_on_device(handle, family), "q")) == on_device
        told = {i: bool(on) for i, on in families.items() if on or i in self.families}
        assert self.families == told, "of others, which were never on the device, nothing is told"
        for core in self.world.cores[1:]:
            assert not Pool([core]).take_family_events(handle), "the first group tells for all"

    def _check_state(self, state: State, known: Known) -> None:
        assert state.num_tokens == known.num_known
        assert state.num_scheduled == known.num_scheduled
        assert state.tier == known.tier
        assert state.admitted_by == known.admitted_by
        assert 0 <= state.num_written <= state.num_scheduled
        assert state.num_scheduled <= state.num_blocks * self.world.block_size


class World:
    """One pool, its data plane, and the engines on it. ``pool`` is what sessions call; ``cores``
    and ``planes`` have one for each group.
    """

    def __init__(
        self, groups: Sequence[Group], block_size: int, quota: int = 0, policy: str = "lru"
    ) -> None:
        self.cores = [
            LayerGroup(
                block_size, group.num_device, group.num_host,
                window_tokens=group.window, max_sequences=12, max_owner_blocks=quota, seed=7,
                eviction_policy=policy, holds_states=group.states,
            )
            for group in groups
        ]  # fmt: skip
        self.pool = OneGroup(self.cores[0]) if len(groups) == 1 else Pool(self.cores)
        self.groups, self.block_size, self.quota = groups, block_size, quota
        self.has_windows = any(group.window for group in groups)
        self.has_states = groups[-1].states
        self.whole = next((i for i, group in enumerate(groups) if not group.window), 0)
        of_tokens = [group for group in groups if not group.states]
        self.sizes = {
            DEVICE: min(group.num_device for group in of_tokens),
            HOST: min(group.num_host for group in of_tokens),
        }
        self.planes = [Plane(block_size, group.window, states=group.states) for group in groups]
        self.num_sessions = 0
        self.engines: list[Engine] = []
        self.ended: list[Engine] = []  # their fences are not done

    def num_found(self, root: bytes, tokens: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt are cached."""
        return sum(find(self.pool, self.cores[0], root, i32(tokens))[0])

    def finished(self, engine: Engine) -> int:
        """Return the last plan of a session that has run."""
        (number,) = {plane.finished.get(engine.id, 0) for plane in self.planes}
        return number

    def run(self, engine: Engine, plan: MadePlan, halfway: Random | None = None) -> bool:
        """Run as ``Plane.run``, in all groups."""
        (ran,) = {
            plane.run(engine.id, plan.in_group(group), halfway)
            for group, plane in enumerate(self.planes)
        }
        return ran

    def open(self, root: bytes = b"ann") -> Engine:
        engine = Engine(self, root)
        self.engines.append(engine)
        return engine

    def end(self, engine: Engine) -> None:
        engine.end()
        self.engines.remove(engine)
        self.ended.append(engine)

    def fence(self, engine: Engine) -> None:
        for plane in self.planes:
            plane.fence(engine.id)
        self.pool.session_fenced(engine.caller.handle)
        self.ended.remove(engine)

    def take_publications(self) -> None:
        """Deliver publications and withdrawals to the data plane at once."""
        for core, plane in zip(self.cores, self.planes, strict=True):
            self._take_publications(core, plane)

    def _take_publications(self, core: LayerGroup, plane: Plane) -> None:
        blocks, generations = core.take_withdrawn(1000)
        for block, generation in zip(ints(blocks, "i"), ints(generations, "q"), strict=True):
            plane.withdraw(block, generation)
        for run in core.take_publications(3):
            root, *columns, _, tokens = run
            indices, generations, parents, above = (
                ints(column, width) for column, width in zip(columns, "iqiq", strict=True)
            )
            size = self.block_size
            token_ids = ints(tokens, "i")
            for i, block in enumerate(indices):
                parent = None if parents[i] == -1 else Ref(DEVICE, parents[i], above[i])
                plane.publish(
                    block,
                    generations[i],
                    parent,
                    token_ids[i * size : (i + 1) * size],
                    hash(root),
                    self.planes[self.whole],
                )

    def check_quiet(self, engine: Engine, group: int, places: Sequence[Place]) -> None:
        """Check that no unfinished plan of another session may touch the blocks that the engine's
        plan allocates, and that no table of another session refers to them.
        """
        for other in self.engines + self.ended:
            if other is engine:
                continue
            for issued in other.queue + other.voided:
                both = issued.touches.intersection((group, place) for place in places)
                assert not both, f"{both} allocated while plan {issued.plan.number} may touch it"
            for i in other.sequences:
                table = {ref.place for ref in other.views[group].table(i) if ref}
                assert not table.intersection(places), f"sequence {i} of {other.id} lost a block"

    def check_integrity(self) -> None:
        """Run the core's own checks."""
        for core in self.cores:
            core.check_integrity()

    def check(self) -> None:
        self.check_integrity()
        for engine in self.engines:
            engine.check()
        for group in range(len(self.cores)):
            self._check_usage(group)

    def _check_usage(self, group: int) -> None:
        in_tables: dict[int, set[int]] = {DEVICE: set(), HOST: set()}
        for engine in self.engines:
            for i in engine.sequences:
                for ref in filter(None, engine.views[group].table(i)):
                    in_tables[ref.tier].add(ref.index)
        of_group = self.groups[group]
        for tier, size in {DEVICE: of_group.num_device, HOST: of_group.num_host}.items():
            num, free, cached, held, retired = self.cores[group].usage(tier)
            assert num == size == free + cached + held + retired
            assert held >= len(in_tables[tier])

    def dump(self) -> tuple[object, ...]:
        return tuple(
            dump(OneGroup(core), [engine.views[group] for engine in self.engines])
            for group, core in enumerate(self.cores)
        )
