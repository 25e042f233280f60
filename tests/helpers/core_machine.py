"""A random walk over every call of the core, next to a data plane that checks each byte.

Engines, losses, repeats, aborts, restarts of either plane; after every rule ``check_integrity``.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from core_data_plane import BLOCK, pack
from core_model import Engine, ModelSequence, World
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from control_plane.planning.model import (
    Admit,
    Append,
    CoreConfig,
    Fork,
    Free,
    Operation,
    Status,
    SwapIn,
    SwapOut,
    Tier,
)
from kvplane.errors import StaleError, TooManyPlansInFlightError

LEASE_S = 30.0
MAX_ENGINES = 3
# What ends sessions ends the story: most walks must get far before it happens.
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
    @rule(tenant=st.sampled_from(["ann", "bob"]))
    def open(self, tenant: str) -> None:
        if self.world.core.describe_pool("pool").ready:
            self.engines.append(self.world.engine(tenant))

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
        core, clock = self.world.core, self.world.clock
        core.tick()
        for _ in range(3):  # never so far at once that the core takes itself for one that slept
            clock.now += LEASE_S * 0.4
            for engine in self.engines:
                if engine is not gone:
                    core.renew_session(engine.id, engine.tenant)
            core.tick()
        with pytest.raises(StaleError):
            core.renew_session(gone.id, gone.tenant)
        self.engines.remove(gone)

    # Steps

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), rng=RANDOMS, num_operations=st.integers(1, 3), tells=st.booleans())
    def step(self, data: st.DataObject, rng: Random, num_operations: int, tells: bool) -> None:
        engine = self.pick(data)
        operations = [self.operation(rng, engine) for _ in range(num_operations)]
        receipts = list(engine.receipts) if tells else []
        try:
            outcome = engine.step(*operations, receipts=receipts, late=data.draw(st.booleans()))
        except TooManyPlansInFlightError:
            return
        if tells:
            engine.receipts.clear()
        for operation, result in zip(operations, outcome.results, strict=True):
            if result.status is Status.LATER:
                assert result.shortage is not None
            if result.status is Status.NEVER:
                assert self.never_fits(engine, operation)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), rng=RANDOMS, num_steps=st.integers(5, 30), runs=st.booleans())
    def serve(self, data: st.DataObject, rng: Random, num_steps: int, runs: bool) -> None:
        """Undisturbed steps, each run and receipted before the next, or one behind."""
        engine = self.pick(data)
        for _ in range(num_steps):
            if not runs and len(engine.queue) > 1:
                engine.run_all()
            self.make_steps_possible(engine)
            operations = [self.operation(rng, engine) for _ in range(rng.randint(1, 3))]
            receipts, engine.receipts = engine.receipts, []
            engine.step(*operations, receipts=receipts, late=True)
            if runs:
                engine.run_all()
            self.world.core.check_integrity()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 1, 2, 8]))
    def decode(self, data: st.DataObject, num_tokens: int) -> None:
        """Every sequence on the device grows by the same tokens."""
        engine = self.pick(data)
        self.make_steps_possible(engine)
        grown = [
            Append(i, pack(s.truth[s.num_known : s.num_scheduled] + [1] * num_tokens), num_tokens)
            for i, s in engine.sequences.items()
            if s.tier is Tier.DEVICE
        ]
        engine.step(*grown)
        engine.run_all()
        engine.settle()

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def repeat_a_step(self, data: st.DataObject) -> None:
        engine = self.pick(data)
        if engine.last is None:
            return
        operations, receipts, answer = engine.last
        content = str(engine.number).encode()
        again = self.world.core.step(
            engine.id, engine.tenant, engine.number, operations, receipts, content=content
        )
        assert again is answer

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), loses=st.booleans())
    def submit_receipts(self, data: st.DataObject, loses: bool) -> None:
        engine = self.pick(data)
        receipts = data.draw(st.permutations(engine.receipts))
        if loses:
            receipts = receipts[: len(receipts) // 2]
        engine.submit(receipts, engine.late_tokens() if data.draw(st.booleans()) else ())
        engine.submit(receipts)
        if not loses:
            engine.receipts.clear()

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
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        engine = self.pick(data)
        session = self.world.core._sessions[engine.id]
        if session.plans:
            number = data.draw(st.sampled_from(sorted(session.plans)))
            engine.abort(number)
            before = self.world.core.describe_pool("pool")
            engine.abort(number)
            assert self.world.core.describe_pool("pool") == before

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def resync(self, data: st.DataObject) -> None:
        self.pick(data).resync()

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
            plane.pump()
            self.assert_knows_all_published(plane)

    @rule()
    def mend_registrations(self) -> None:
        for plane in self.world.shards:
            plane.join()
            plane.pump()

    @rule()
    def pump(self) -> None:
        self.world.pump()

    @rule(data=st.data(), grows=st.booleans(), really=RARELY)
    def restart_a_data_plane(self, data: st.DataObject, grows: bool, really: bool) -> None:
        if not really:
            return
        plane = data.draw(st.sampled_from(self.world.shards))
        plane.restart()
        plane.sizes[Tier.DEVICE] += grows
        self.num_device = min(shard.sizes[Tier.DEVICE] for shard in self.world.shards)
        plane.join()
        self.lose_engines()

    @rule(really=RARELY)
    def restart_the_control_plane(self, really: bool) -> None:
        if not really:
            return
        self.world.restart_control_plane()
        self.engines.clear()

    # After every rule

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.core.check_integrity()
            for engine in self.engines:
                engine.check()

    def teardown(self) -> None:
        """When all is done and told, nothing is held and the whole pool can be had."""
        if not hasattr(self, "world"):
            return
        for engine in self.engines:
            engine.close()
        for plane in self.world.shards:
            plane.join()
        self.world.pump()
        self.world.core.check_integrity()
        for tier in Tier:
            usage = self.world.usage(tier)
            assert usage["held"] == usage["limbo"] == usage["reserved"] == 0, usage
        engine = self.world.engine("eve")
        outcome = engine.step(Admit(1, pack([5] * (self.num_device * BLOCK))))
        assert outcome.results[0].status is Status.OK, (
            "a whole pool is never too small for its size"
        )

    # Helpers

    def make_steps_possible(self, engine: Engine) -> None:
        """Run and receipt what is in flight, if it is as much as may be."""
        if len(self.world.core._sessions[engine.id].plans) >= 3:
            engine.run_all()
            engine.settle()

    def pick(self, data: st.DataObject) -> Engine:
        engine: Engine = data.draw(st.sampled_from(self.engines))
        return engine

    def lose_engines(self) -> None:
        for engine in self.engines:
            with pytest.raises(StaleError):
                self.world.core.renew_session(engine.id, engine.tenant)
        self.engines.clear()

    def never_fits(self, engine: Engine, operation: Operation) -> bool:
        if isinstance(operation, Admit):
            num_tokens = max(len(operation.token_ids) // 4, operation.max_total_tokens)
            return num_tokens > self.num_device * BLOCK
        return isinstance(operation, Append | SwapOut | SwapIn)

    def assert_knows_all_published(self, plane: Any) -> None:
        index = self.world.core._pools["pool"].device.index
        blocks = [block for _, block in index.published()]
        for block, hash_ in zip(blocks, index.hashes(blocks), strict=True):
            assert plane.published[block].hash == hash_

    def operation(self, rng: Random, engine: Engine) -> Operation:
        """A change that makes sense most of the time."""
        live = sorted(engine.sequences)
        unused = [i for i in range(1, 7) if i not in live]
        kinds = ["admit"]
        if live:
            kinds += ["append"] * 4 + ["fork", "swap", "free"]
        kind = rng.choice(kinds)
        if kind == "admit":
            token = rng.choice([0, 1])
            num_tokens = rng.choice([1, 7, 8, 9, 16, 17, 24, 32, 45])
            return Admit(
                rng.choice(unused + live[:1]),
                pack([token] * num_tokens + rng.choice([[], [], [2], [3, 2]])),
                num_compute_tokens=rng.choice([None, None, None, 0, 8, 11]),
                max_total_tokens=rng.choice([0, 0, 20, 48, 200]),
                skip_prefix_lookup=rng.random() < 0.1,
            )
        sequence_id = rng.choice(live)
        sequence = engine.sequences[sequence_id]
        if kind == "append":
            return self.append(rng, sequence_id, sequence)
        if kind == "fork":
            return Fork(sequence_id, rng.choice(unused + live[:1]))
        if kind == "free":
            return Free(sequence_id)
        same = [i for i in live if engine.sequences[i].tier is sequence.tier]
        chosen = tuple(rng.sample(same, rng.randint(1, len(same))))
        return SwapOut(chosen) if sequence.tier is Tier.DEVICE else SwapIn(chosen)

    def append(self, rng: Random, sequence_id: int, sequence: ModelSequence) -> Append:
        ahead = sequence.truth[sequence.num_known : sequence.num_scheduled]
        tokens = ahead if rng.random() < 0.7 else []
        if len(tokens) == len(ahead):
            tokens = tokens + [rng.choice([0, 1])] * rng.choice([0, 1, 1, 2, 9])
        return Append(sequence_id, pack(tokens), rng.choice([0, 1, 1, 1, 2, 8, 10]))
