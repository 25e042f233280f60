"""A random walk over every call of the core, next to a data plane that checks each slot.

It has engines, losses, repeats, late duplicates, aborts and restarts of either plane, and calls
``check_integrity`` after every rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from control_plane.config import CoreConfig
from control_plane.pools.publications import publish_message
from kvplane import ops
from kvplane.errors import StaleError, StepConflictError, TooManyPlansInFlightError
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_beliefs import ModelSequence
from tests.helpers.core.core_data_plane import DataPlane
from tests.helpers.core.core_messages import BLOCK, DEVICE, TIERS, pack, publications_of
from tests.helpers.core.core_model import LATER, NEVER, OK, Engine, World, status_of

LEASE_S = 30.0
MAX_ENGINES = 3
# Events that end sessions are rare, so that most walks get far before them.
RANDOMS = st.integers(0, 2**32).map(Random)
RARELY = st.integers(0, 11).map(lambda n: n == 11)


class CoreMachine(RuleBasedStateMachine):
    """Engines on one pool, messages that get lost, and everything that may restart."""

    @initialize(
        num_shards=st.integers(1, 2),
        num_device=st.integers(6, 16),
        num_host=st.integers(0, 8),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def begin(self, num_shards: int, num_device: int, num_host: int, watermark: float) -> None:
        self.world = World(
            num_shards=num_shards,
            num_device=num_device,
            num_host=num_host,
            config=CoreConfig(lease_s=LEASE_S, max_plans_in_flight=3, watermark=watermark),
        )
        self.num_device = num_device
        self.engines = [self.world.engine("ann"), self.world.engine("ann")]

    # Sessions

    @precondition(lambda self: len(self.engines) < MAX_ENGINES)
    @rule(
        owner=st.sampled_from([("ann", ""), ("ann", ""), ("ann", "adapter"), ("bob", "")]),
    )
    def open(self, owner: tuple[str, str]) -> None:
        if self.world.pool().ready:
            self.engines.append(self.world.engine(*owner))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), really=RARELY)
    def close(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        engine = self.pick(data)
        engine.close()
        engine.close()
        self.engines.remove(engine)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), really=RARELY)
    def let_expire(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        gone = self.pick(data)
        self.world.tick()
        for _ in range(3):  # never so far at once that the core concludes that it slept
            self.world.clock.now += LEASE_S * 0.4
            self.keep_open_engines()
            for engine in self.engines:
                if engine is not gone:
                    engine.renew()
            self.world.tick()
        with pytest.raises(StaleError):
            gone.renew()
        self.keep_open_engines()

    @rule(seconds=st.sampled_from([0.5, 1.5, 12.0]))
    def time_passes(self, seconds: float) -> None:
        """Advance time, after which waiting admissions make others yield: sequences are cut."""
        for engine in self.engines:
            engine.renew()
        self.world.clock.now += seconds
        self.world.tick()
        self.keep_open_engines()

    # Steps

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), rng=RANDOMS, num_operations=st.integers(1, 3), submits=st.booleans())
    def step(self, data: st.DataObject, rng: Random, num_operations: int, submits: bool) -> None:
        engine = self.pick(data)
        operations = [self.operation(rng, engine) for _ in range(num_operations)]
        receipts = list(engine.receipts) if submits else []
        if submits:
            engine.receipts.clear()
        try:
            result = engine.step(*operations, receipts=receipts, deferred=data.draw(st.booleans()))
        except TooManyPlansInFlightError:
            engine.believe_past()
            return
        for operation, done in zip(operations, result.results, strict=True):
            for failure in done.failures:
                assert failure.HasField("shortage") == (failure.status in (LATER, NEVER))
                if failure.status == NEVER:
                    assert self.never_fits(operation)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), rng=RANDOMS, num_steps=st.integers(5, 30), runs=st.booleans())
    def serve(self, data: st.DataObject, rng: Random, num_steps: int, runs: bool) -> None:
        """Take undisturbed steps, each run and receipted before the next, or one behind."""
        engine = self.pick(data)
        for _ in range(num_steps):
            if not runs and len(engine.queue) > 1:
                engine.run_all()
            self.make_steps_possible(engine)
            operations = [self.operation(rng, engine) for _ in range(rng.randint(1, 3))]
            receipts, engine.receipts = engine.receipts, []
            engine.step(*operations, receipts=receipts, deferred=True)
            if runs:
                engine.run_all()
            self.world.core.check_integrity()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 1, 2, 8]))
    def decode(self, data: st.DataObject, num_tokens: int) -> None:
        """Append the same number of tokens to every sequence on the device, in one operation."""
        engine = self.pick(data)
        self.make_steps_possible(engine)
        growths = [
            engine.growth(i, ahead_of(s) + [1] * num_tokens, num_tokens)
            for i, s in engine.sequences.items()
            if s.tier == DEVICE
        ]
        engine.step(joined(growths))
        engine.run_all()
        engine.settle()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), loses=st.booleans())
    def submit_receipts(self, data: st.DataObject, loses: bool) -> None:
        engine = self.pick(data)
        receipts = data.draw(st.permutations(engine.receipts))
        if loses:
            receipts = receipts[: len(receipts) // 2]
        engine.submit(receipts, deferred=data.draw(st.booleans()))
        engine.submit(receipts)
        if not loses:
            engine.receipts.clear()

    @precondition(lambda self: any(engine.sent for engine in self.engines))
    @rule(data=st.data(), rng=RANDOMS)
    def duplicates_arrive_late(self, data: st.DataObject, rng: Random) -> None:
        """Deliver requests again that were answered long ago, or refused."""
        engine = data.draw(st.sampled_from([e for e in self.engines if e.sent]))
        for sent in rng.sample(engine.sent, min(len(engine.sent), 3)) + engine.sent[-4:]:
            engine.repeat(sent)

    @precondition(lambda self: any(engine.sent for engine in self.engines))
    @rule(data=st.data(), rng=RANDOMS)
    def a_number_is_used_again(self, data: st.DataObject, rng: Random) -> None:
        """Check that the last number with other content is refused, whatever its outcome was."""
        engine = data.draw(st.sampled_from([e for e in self.engines if e.sent]))
        before = engine.everything()
        request = cpb.StepRequest(
            session=engine.ref,
            number=engine.number,
            operations=[self.operation(rng, engine), ops.free([99])],
        )
        with pytest.raises(StepConflictError) as refused:
            self.world.core.step(request, engine.tenant)
        assert refused.value.next_number == engine.number + 1
        assert engine.everything() == before

    # Plans

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), halfway=st.booleans(), skip=st.booleans())
    def run_a_plan(self, data: st.DataObject, halfway: bool, skip: bool) -> None:
        engine = self.pick(data)
        shard = data.draw(st.integers(0, len(self.world.shards) - 1))
        engine.run_next(shard, halfway=halfway, skip=skip)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def run_all_plans(self, data: st.DataObject) -> None:
        engine = self.pick(data)
        engine.run_all()
        engine.settle()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), submits=st.booleans())
    def abort(self, data: st.DataObject, submits: bool) -> None:
        engine = self.pick(data)
        session = self.world.core.sessions.by_id[engine.id]
        if session.plans:
            number = data.draw(st.sampled_from(sorted(session.plans)))
            receipts = list(engine.receipts) if submits else []
            if number > engine.done_with(receipts):
                engine.abort(number, receipts)
                engine.repeat(engine.sent[-1])
                before = engine.everything()
                engine.abort(number)
                assert engine.everything() == before

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), submits=st.booleans())
    def resync(self, data: st.DataObject, submits: bool) -> None:
        engine = self.pick(data)
        engine.resync(list(engine.receipts) if submits else [])

    # Restarts and losses

    @rule(data=st.data(), resumes=st.booleans(), really=RARELY)
    def break_a_registration(self, data: st.DataObject, resumes: bool, really: bool) -> None:
        if not really:
            return
        plane = data.draw(st.sampled_from(self.world.shards))
        plane.leave()
        if resumes:
            resumed = plane.join()
            assert resumed
            self.pump()

    @rule()
    def mend_registrations(self) -> None:
        for plane in self.world.shards:
            plane.join()
        self.pump()

    @rule()
    def pump(self) -> None:
        self.world.pump()
        for plane in self.world.shards:
            self.check_publications(plane)

    @rule(data=st.data(), grows=st.booleans(), really=RARELY)
    def restart_a_data_plane(self, data: st.DataObject, grows: bool, really: bool) -> None:
        if not really:
            return
        plane = data.draw(st.sampled_from(self.world.shards))
        plane.restart()
        plane.sizes[DEVICE] += grows
        self.num_device = min(shard.sizes[DEVICE] for shard in self.world.shards)
        plane.join()
        self.lose_engines()

    @rule(really=RARELY)
    def restart_the_control_plane(self, really: bool) -> None:
        if not really:
            return
        self.world.restart_control_plane()
        self.lose_engines()

    # After every rule

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.core.check_integrity()
            for engine in self.engines:
                engine.check()

    def teardown(self) -> None:
        """Check that finally nothing is held, and that the whole pool can be allocated."""
        if not hasattr(self, "world"):
            return
        for engine in self.engines:
            engine.close()
        for plane in self.world.shards:
            plane.join()
        self.world.pump()
        self.world.core.check_integrity()
        for tier in TIERS:
            usage = self.world.usage(tier)
            assert usage["held"] == usage["retired"] == 0, usage
        engine = self.world.engine("eve")
        result = engine.step(ops.admit(1, pack([5] * (self.num_device * BLOCK))))
        assert status_of(result.results[0]) == OK, "a whole pool is never too small for its size"

    # Helpers

    def make_steps_possible(self, engine: Engine) -> None:
        """Run and receipt the plans in flight, if no more are allowed."""
        if len(self.world.core.sessions.by_id[engine.id].plans) >= 3:
            engine.run_all()
            engine.settle()

    def pick(self, data: st.DataObject) -> Engine:
        engine: Engine = data.draw(st.sampled_from(self.engines))
        return engine

    def keep_open_engines(self) -> None:
        """Drop engines whose sessions may have been ended for the receipts that they keep."""
        sessions = self.world.core.sessions.by_id
        self.engines = [engine for engine in self.engines if engine.id in sessions]

    def lose_engines(self) -> None:
        for engine in self.engines:
            with pytest.raises(StaleError):
                engine.renew()
        self.engines.clear()

    def never_fits(self, operation: cpb.Operation) -> bool:
        if operation.HasField("admit"):
            admit = operation.admit
            num_tokens = max(len(admit.token_ids) // 4, admit.max_total_tokens)
            return num_tokens > self.num_device * BLOCK
        return operation.WhichOneof("operation") in ("append", "swap")

    def check_publications(self, plane: DataPlane) -> None:
        """Check that a connected data plane has all publications of blocks that can be found."""
        pool = self.world.core._pools["pool"]
        if not pool.built or not pool.shards.states[plane.index].connected:
            return
        for run in pool.primary.all_publications(3):
            for index, known in publications_of(publish_message(run).publish.publications).items():
                assert plane.published[index] == known

    def operation(self, rng: Random, engine: Engine) -> cpb.Operation:
        """Return a change that makes sense most of the time."""
        live = sorted(engine.sequences)
        unused = [i for i in range(1, 7) if i not in live]
        kinds = ["admit"]
        if live:
            kinds += ["append"] * 4 + ["fork", "swap", "free", "truncate"]
        if engine.waiting:
            kinds.append("withdraw")
        kind = rng.choice(kinds)
        if kind == "withdraw":
            return ops.free(rng.sample(sorted(engine.waiting), 1))
        if kind == "admit":
            token = rng.choice([0, 1])
            num_tokens = rng.choice([1, 7, 8, 9, 16, 17, 24, 32, 45])
            return ops.admit(
                rng.choice(unused + live[:1]),
                pack([token] * num_tokens + rng.choice([[], [], [2], [3, 2]])),
                num_compute_tokens=rng.choice([None, None, None, 0, 8, 11]),
                max_total_tokens=rng.choice([0, 0, 20, 48, 200]),
                skip_prefix_lookup=rng.random() < 0.1,
                fork_sequence_ids=rng.choice([[], [], [], [7], [8, 7]]),
                wait=rng.random() < 0.3,
            )
        chosen = rng.sample(live, rng.choice([1, 1, 1, min(2, len(live)), len(live)]))
        if kind == "append":
            return joined([growth(rng, engine, i) for i in chosen])
        if kind == "fork":
            return ops.fork(chosen[:2], rng.sample(unused + live[:1] + [9], len(chosen[:2])))
        if kind == "free":
            return ops.free(chosen if rng.random() < 0.3 else chosen[:1])
        if kind == "truncate":
            lengths = [
                max(engine.sequences[i].num_known, engine.sequences[i].num_scheduled)
                for i in chosen
            ]
            return ops.truncate(chosen, [max(1, n - rng.choice([0, 1, 3, 9])) for n in lengths])
        tier = engine.sequences[chosen[0]].tier
        same = [i for i in chosen if engine.sequences[i].tier == tier]
        return ops.swap(same, "host") if tier == DEVICE else ops.swap(same, "device")


def growth(rng: Random, engine: Engine, sequence_id: int) -> cpb.Operation:
    """Return an append, sometimes of tokens that cannot be known yet or at a wrong position."""
    ahead = ahead_of(engine.sequences[sequence_id])
    tokens = ahead if rng.random() < 0.7 else []
    if len(tokens) == len(ahead):
        tokens = tokens + [rng.choice([0, 1])] * rng.choice([0, 1, 1, 2, 9])
    operation = engine.growth(sequence_id, tokens, rng.choice([0, 1, 1, 1, 2, 8, 10]))
    if rng.random() < 0.05:
        wrong = engine.sequences[sequence_id].num_scheduled + rng.choice([-1, 1])
        operation.append.first_positions = columns.pack(INT32, [wrong])
    return operation


def ahead_of(sequence: ModelSequence) -> list[int]:
    """Return tokens of scheduled slots that the core was not given yet."""
    return sequence.truth[sequence.num_known : sequence.num_scheduled]


def joined(appends: Iterable[cpb.Operation]) -> cpb.Operation:
    """Return all operations as one."""
    columns_of: dict[str, bytes] = dict.fromkeys(
        ("sequence_ids", "first_positions", "num_slots", "num_tokens", "token_ids"), b""
    )
    for operation in appends:
        for name in columns_of:
            columns_of[name] += getattr(operation.append, name)
    fields: dict[str, Any] = columns_of
    return ops.append(**fields)
