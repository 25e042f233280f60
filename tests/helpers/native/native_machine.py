"""A random walk over every call of the native core, next to a data plane that checks each slot.

The walk has engines, aborts, plans that run late, halfway or never, receipts that arrive late,
grants, cuts, ends and fences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar

from kvplane_blocks import Pool

from tests.helpers.native.native_pool import DEVICE, HOST, Code, Kind, find, i32
from tests.helpers.native.native_sessions import Engine, Group, Known, World


@dataclass(frozen=True)
class Shape:
    """A pool: ``quota``: device blocks of an owner, 0 for any."""

    block_size: int
    groups: tuple[Group, ...]
    quota: int = 0

    def __str__(self) -> str:
        groups = "-".join(
            f"{g.num_device}+{g.num_host}" + ("s" if g.states else f"w{g.window}")
            for g in self.groups
        )
        return f"{self.block_size}-{groups}-{self.quota}"


SHAPES = [
    Shape(4, (Group(8, 0),)),
    Shape(4, (Group(8, 5),)),
    Shape(4, (Group(12, 12),)),
    Shape(4, (Group(16, 3),)),
    Shape(4, (Group(10, 4, window=6),)),
    Shape(4, (Group(10, 4, window=1),)),
    Shape(2, (Group(14, 6, window=3),)),
    Shape(1, (Group(240, 60),)),
    Shape(1, (Group(200, 40, window=70),)),
    Shape(4, (Group(16, 5),), quota=7),
    Shape(2, (Group(14, 6, window=3),), quota=6),
    Shape(64, (Group(12, 4),)),  # its prompts are of several chunks of tokens
]
GROUPED_SHAPES = [
    Shape(4, (Group(12, 5), Group(12, 5, window=6))),
    Shape(4, (Group(10, 4, window=6), Group(16, 6))),
    Shape(2, (Group(20, 6), Group(12, 8, window=3), Group(14, 5, window=9))),
    Shape(1, (Group(200, 60), Group(120, 40, window=30))),
    Shape(4, (Group(12, 5), Group(6, 3, states=True))),
    Shape(2, (Group(20, 0), Group(14, 0, window=3), Group(5, 0, states=True))),
    Shape(1, (Group(200, 40), Group(9, 4, states=True)), quota=60),
]
ROOTS = [b"ann", b"ann", b"ann", b"bob"]
WAITS = (Code.LATER, Code.LATER_HEADROOM, Code.LATER_QUOTA)


class Walk:
    """One world, and the steps that it may take."""

    def __init__(self, rng: Random, shape: Shape, policy: str = "lru") -> None:
        self.rng = rng
        self.world = World(shape.groups, shape.block_size, shape.quota, policy)
        self.world.open()
        self.world.open()

    ACTIONS: ClassVar = {
        "step": 40,
        "run": 14,
        "run_halfway": 4,
        "receive": 14,
        "settle": 8,
        "defer": 8,
        "abort": 3,
        "resync": 1,
        "run_a_voided_plan": 3,
        "grant": 3,
        "cut": 2,
        "open": 1,
        "end": 1,
        "fence": 2,
        "ask": 3,
    }

    def act(self) -> None:
        """Take one step."""
        names, weights = list(self.ACTIONS), list(self.ACTIONS.values())
        (name,) = self.rng.choices(names, weights)
        getattr(self, name)()

    def pick(self) -> Engine:
        if not self.world.engines:
            self.world.open(self.rng.choice(ROOTS))
        return self.rng.choice(self.world.engines)

    # Steps

    def step(self) -> None:
        engine = self.pick()
        if len(engine.queue) > 3:
            engine.run_all()
            engine.receive()
        first = self.operation(engine)
        predicted = None
        if first and self.rng.random() < 0.5:
            before = self.world.dump()
            with engine.caller.checks():
                predicted = first[0]()
            assert self.world.dump() == before, "a check changed something"
        engine.caller.begin()
        if first:
            done = self.do(engine, first)
            assert predicted is None or same(predicted, done), f"{predicted} became {done}"
        for _ in range(self.rng.choice([0, 0, 0, 1, 1, 2, 3])):
            operation = self.operation(engine)
            if operation:
                self.do(engine, operation)
        self.world.check_integrity()
        engine.finish()

    def do(self, engine: Engine, operation: Operation) -> Any:
        """Run an operation and believe its answer; failed operations change nothing."""
        call, believe = operation
        before = self.world.dump()
        quota, core, owner = self.world.quota, self.world.cores[0], engine.caller.owner
        num_owned = core.num_owned(owner)
        answer = call()
        assert not quota or core.num_owned(owner) <= max(quota, num_owned)
        if failed(answer):
            assert self.world.dump() == before, f"{answer} changed something"
        believe(answer)
        return answer

    def operation(self, engine: Engine) -> Operation | None:
        kinds = ["admit"]
        if engine.sequences:
            kinds += ["append"] * 5 + ["fork", "fork", "truncate", "truncate", "free"]
            kinds += ["swap"] * (not self.world.has_states)
        operation: Operation | None = getattr(self, "_" + self.rng.choice(kinds))(engine)
        return operation

    def prompt(self) -> list[int]:
        rng, size = self.rng, self.world.block_size
        most = self.world.sizes[DEVICE] * size
        num = min(rng.choice([1, size, 2 * size, 3 * size, rng.randint(1, most)]), most)
        token = rng.choice([0, 1])
        return [token] * num + rng.choice([[], [], [2], [3, 2]])

    def admission(self, engine: Engine) -> tuple[int, list[int], dict[str, Any]]:
        rng, live = self.rng, sorted(engine.sequences)
        unused = [i for i in range(1, 9) if i not in live] or [99]
        ids = rng.sample(unused, min(len(unused), rng.choice([1, 1, 1, 1, 2, 3])))
        if live and rng.random() < 0.05:
            ids[-1] = live[0]
        options = {
            "forks": ids[1:],
            "num_compute": rng.choice([-1, -1, -1, -1, 0, 3, 8]),
            "max_total": rng.choice([0, 0, 0, 20, 200]),
            "skip": rng.random() < 0.1,
            "headroom": rng.choice([0, 0, 0, 1]),
        }
        tokens, size = self.prompt(), self.world.block_size
        if self.world.has_states:
            options["checkpoint"] = rng.randint(0, len(tokens) // size) * size
        return ids[0], tokens, options

    def _admit(self, engine: Engine, granted_as: int | None = None) -> Operation:
        i, tokens, options = self.admission(engine)
        caller, size = engine.caller, self.world.block_size
        found = min(self.world.num_found(caller.root, tokens) * size, len(tokens) - 1)

        def call() -> Any:
            return caller.admit(i, tokens, admitted_by=granted_as, **options)

        def believe(answer: Any) -> None:
            if len(answer) == 5:
                longest = max(len(tokens), options["max_total"])
                never = longest > self.world.sizes[DEVICE] * size
                assert never or answer[1] != Code.NEVER
                quota = self.world.quota * size
                assert 0 < quota < longest or answer[1] != Code.NEVER_QUOTA
                never = never or 0 < quota < longest
                assert not never or self.world.has_windows or answer[1] not in WAITS
                return
            cached, _, scheduled = answer
            assert cached < len(tokens)
            assert options["skip"] <= (cached == 0)
            assert options["skip"] or cached >= found - size, "a cached prefix is not found"
            admitted_by = caller.number if granted_as is None else granted_as
            known = Known(tokens, len(tokens), cached + scheduled, admitted_by)
            for each in (i, *options["forks"]):
                engine.sequences[each] = known.copy(admitted_by)

        return call, believe

    def _append(self, engine: Engine) -> Operation:
        rng, size = self.rng, self.world.block_size
        live = sorted(engine.sequences)
        rows, grown, checkpoints = [], [], []
        for i in rng.sample(live, rng.choice([1, 1, 2, len(live)]) if len(live) > 1 else 1):
            known = engine.sequences[i]
            num = rng.choice([1, 1, 1, 2, size, size + 1, 0])
            truth = list(known.tokens)
            while len(truth) < known.num_scheduled + num:
                truth.append(rng.choice([0, 0, 1, 2]))
            ahead = truth[known.num_known :]
            given = ahead[: rng.choice([len(ahead), len(ahead), 0, rng.randint(0, len(ahead))])]
            wrong = rng.random() < 0.03
            first = known.num_scheduled + wrong
            rows.append((i, first, num, given, rng.choice([0, 0, 0, 0, 1, 2 * size])))
            grown.append((i, truth, num, len(given)))
            checkpoints.append(self._checkpoint(known.num_scheduled, num))

        def grow(i: int, truth: list[int], num: int, num_given: int) -> None:
            known = engine.sequences[i]
            known.tokens = truth
            known.num_known += num_given
            known.num_scheduled += num

        call = partial(engine.caller.append, *rows, checkpoints=checkpoints)
        return call, of_each(grown, grow)

    def _checkpoint(self, first: int, num: int) -> int:
        """Return a position in what is computed at which a state may be kept; 0 for none."""
        size = self.world.block_size
        ends = range((first // size + 1) * size, first + num + 1, size)
        may_keep = self.world.has_states and self.rng.random() < 0.7
        return self.rng.choice(ends) if may_keep and ends else 0

    def _truncate(self, engine: Engine) -> Operation:
        rng, live = self.rng, sorted(engine.sequences)
        chosen = rng.sample(live, rng.choice([1, 1, min(2, len(live))]))
        rows = []
        for i in chosen:
            known = engine.sequences[i]
            most = max(known.num_known, known.num_scheduled)
            rows.append(
                (i, max(1, most - rng.choice([0, 1, 1, 2, 3, self.world.block_size, most])))
            )

        def truncate(i: int, num: int) -> None:
            engine.sequences[i].truncate(num)

        return partial(engine.caller.truncate, *rows), of_each(rows, truncate)

    def _fork(self, engine: Engine) -> Operation:
        rng, live = self.rng, sorted(engine.sequences)
        parents = rng.sample(live, rng.choice([1, 1, min(2, len(live))]))
        unused = [i for i in range(1, 9) if i not in live] or [99]
        rows = list(zip(parents, rng.sample(unused, min(len(unused), len(parents))), strict=False))
        if rng.random() < 0.1:
            rows.append((rows[0][1], rng.choice([*unused, 77])))  # a child of a child

        def fork(parent: int, child: int) -> None:
            engine.sequences[child] = engine.sequences[parent].copy(engine.caller.number)

        return partial(engine.caller.fork, *rows), of_each(rows, fork)

    def _free(self, engine: Engine) -> Operation:
        live = sorted(engine.sequences)
        chosen = self.rng.sample(live, self.rng.choice([1, 1, min(3, len(live))]))

        return partial(engine.caller.free, *chosen), of_each(zip(chosen), engine.sequences.pop)

    def _swap(self, engine: Engine) -> Operation:
        rng, live = self.rng, sorted(engine.sequences)
        first = rng.choice(live)
        tier = engine.sequences[first].tier
        same_tier = [i for i in live if engine.sequences[i].tier == tier and i != first]
        chosen = [first, *rng.sample(same_tier, rng.randint(0, len(same_tier)))]
        destination = HOST if tier == DEVICE else DEVICE

        def believe(answer: Any) -> None:
            if isinstance(answer, int):
                for i in chosen:
                    engine.sequences[i].tier = destination

        return partial(engine.caller.swap, chosen, destination), believe

    # Plans and receipts

    def run(self) -> None:
        self.pick().run_next()

    def run_halfway(self) -> None:
        engine = self.pick()
        for issued in engine.queue:
            if issued.plan.number > self.world.finished(engine):
                self.world.run(engine, issued.plan, self.rng)
                return

    def run_a_voided_plan(self) -> None:
        """Run an aborted plan for the first time, or again."""
        for engine in self.world.engines + self.world.ended:
            for issued in engine.voided[:1] + engine.queue[:1]:
                halfway = self.rng.random() < 0.3
                self.world.run(engine, issued.plan, self.rng if halfway else None)

    def receive(self) -> None:
        engine = self.pick()
        numbers = [issued.plan.number for issued in engine.queue]
        engine.receive(self.rng.choice([None, *numbers]))

    def settle(self) -> None:
        engine = self.pick()
        engine.run_all()
        engine.receive()

    def defer(self) -> None:
        """Submit tokens whose slots were reserved."""
        engine, rng = self.pick(), self.rng
        rows = []
        for i, known in engine.sequences.items():
            end = min(len(known.tokens), known.num_scheduled)
            if known.num_known < end and rng.random() < 0.7:
                first = rng.randint(max(0, known.num_known - 3), known.num_known)
                end = rng.randint(known.num_known + 1, end)
                rows.append((i, known.admitted_by, first, known.tokens[first:end]))
        wrong = rng.random() < 0.1
        if wrong:
            rows.append(rng.choice([(98, 1, 0, [1]), (0, 1, 0, [1])]))
        if not rows:
            return
        before = self.world.dump() if wrong else None
        failure = engine.caller.deferred(*rows)
        assert (failure is not None) == wrong, failure
        if wrong:
            assert self.world.dump() == before
            return
        for i, _, first, tokens in rows:
            engine.sequences[i].num_known = first + len(tokens)
        self.world.take_publications()

    def abort(self) -> None:
        self.pick().abort()

    def resync(self) -> None:
        (engine := self.pick()).abort(keeps_tables=False)
        self.world.check()
        engine.caller.begin()
        engine.finish()
        assert Kind.KEEP not in {change.kind for change in engine.queue[-1].plan.changes}

    # Outside of steps

    def grant(self) -> None:
        """Admit a waiting sequence between steps."""
        engine = self.pick()
        operation = self._admit(engine, granted_as=self.rng.randint(0, engine.caller.number))
        num_before = len(engine.sequences)
        self.do(engine, operation)
        engine.has_draft = engine.has_draft or len(engine.sequences) > num_before

    def cut(self) -> None:
        engine = self.pick()
        if engine.sequences:
            i = self.rng.choice(sorted(engine.sequences))
            self.world.pool.cut(engine.caller.handle, i)
            del engine.sequences[i]
            engine.has_draft = True

    def ask(self) -> None:
        """Check that queries change nothing."""
        engine = self.pick()
        before = self.world.dump()
        root, tokens = engine.caller.root, self.prompt()
        num_found = self.world.num_found(root, tokens)
        for core, group in zip(self.world.cores, self.world.groups, strict=True):
            if not group.window and not group.states:  # then all leading blocks are there
                alone = Pool([core])
                counts, columns = find(alone, core, root, i32(tokens))
                assert find(alone, core, root, hashes=columns[0]) == (counts, columns)
                assert num_found <= sum(counts)
        assert self.world.dump() == before

    def open(self) -> None:
        if len(self.world.engines) < 3:
            self.world.open(self.rng.choice(ROOTS))

    def end(self) -> None:
        self.world.end(self.pick())

    def fence(self) -> None:
        if self.world.ended:
            self.world.fence(self.rng.choice(self.world.ended))

    def finish(self) -> None:
        """Check that finally nothing is held, and that the whole pool can be allocated."""
        world = self.world
        for engine in list(world.engines):
            world.end(engine)
        world.check()
        for engine in list(world.ended):
            world.fence(engine)
        world.check()
        for tier in (DEVICE, HOST):
            for core in world.cores:
                _, _, _, held, retired = core.usage(tier)
                assert held == retired == 0
        engine = world.open(b"eve")
        engine.caller.begin()
        num = min(world.sizes[DEVICE], world.quota or math.inf) * world.block_size
        assert len(engine.caller.admit(1, [5] * num)) == 3, "a pool is too small for its size"


Operation = tuple[Callable[[], Any], Callable[[Any], None]]


def of_each(
    rows: Iterable[tuple[Any, ...]], believe: Callable[..., object]
) -> Callable[[Any], None]:
    """Return what to believe of an operation's answer: ``believe`` each row that was done."""
    rows = list(rows)

    def believe_all(answer: Any) -> None:
        refused = {failure[0] for failure in answer[1]}
        for item, row in enumerate(rows):
            if item not in refused:
                believe(*row)

    return believe_all


def failed(answer: Any) -> bool:
    """Return whether all of an operation was refused."""
    if isinstance(answer, int):
        return False
    if isinstance(answer[0], list):
        return len(answer[0]) == len(answer[1])
    return len(answer) == 5


def same(predicted: Any, done: Any) -> bool:
    """Return whether a check predicted the outcome; of several items, of the first."""
    if isinstance(done, tuple) and isinstance(done[0], list):
        predicted, done = ([f for f in each[1] if f[0] == 0] for each in (predicted, done))
    return bool(predicted == done)
