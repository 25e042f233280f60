"""A random walk over both planes: the real core, real executors, and the messages between them.

Several control planes and several processes of each shard live at once, streams break, messages
come late, twice or never. Whatever happens, no engine sees a value that is not its own, what must
be refused is refused, and when all faults end the whole pool can be had.
"""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from planes_engine import DEVICE, Engine, Known, Sent, deferred_of
from planes_values import BLOCK, NUM_LAYERS, TENANTS
from planes_world import LEASE_S, POOL, ControlProcess, DataProcess, World, wire

from kvplane import columns, ops
from kvplane.columns import INT64
from kvplane.errors import (
    KvplaneError,
    LayoutMismatchError,
    InvalidRequestError,
    PlanConflictError,
    PlanOutOfOrderError,
    PoolNotReadyError,
    SequenceNotFoundError,
    SessionNotFoundError,
    StaleEpochError,
    StaleError,
    StaleIncarnationError,
    StepOutOfOrderError,
    TooManyPlansInFlightError,
    BadSignatureError,
)
from kvplane.shard import Shard
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

MAX_ENGINES, MAX_GONE = 4, 6
RANDOMS = st.integers(0, 2**32).map(Random)
# What ends sessions ends the story: most walks must get far before it happens.
RARELY = st.integers(0, 3).map(lambda n: n == 3)
OWNERS = [("ann", ""), ("ann", ""), ("ann", "adapter"), ("bob", ""), ("bob", "")]


class PlanesMachine(RuleBasedStateMachine):
    """Engines on one pool of one or two shards."""

    @initialize(
        num_shards=st.integers(1, 2),
        by_layers=st.booleans(),
        num_device=st.integers(5, 12),
        num_host=st.integers(0, 6),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def begin(
        self, num_shards: int, by_layers: bool, num_device: int, num_host: int, watermark: float
    ) -> None:
        self.world = World(
            num_shards=num_shards,
            by_layers=by_layers,
            num_device=num_device,
            num_host=num_host,
            watermark=watermark,
        )
        self.engines = [Engine(self.world, self.world.control, owner) for owner in OWNERS[1:4:2]]
        self.gone: list[Engine] = []
        self.closed: list[tuple[tpb.SessionRef, str]] = []

    # Engines

    @rule(rng=RANDOMS)
    def open_session(self, rng: Random) -> None:
        control = rng.choice([self.world.control, *self.world.controls])
        self.open(control, rng)

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS, really=RARELY)
    def close_session(self, rng: Random, really: bool) -> None:
        if really:
            self.close(rng.choice(self.engines))

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS, really=RARELY)
    def let_a_lease_run_out(self, rng: Random, really: bool) -> None:
        if not really:
            return
        late = rng.choice(self.engines)
        late.may_end = True
        for control in self.world.controls:
            control.core.tick()
        for _ in range(3):  # never so far at once that a core takes itself for one that slept
            self.world.clock.now += LEASE_S * 0.4
            for engine in self.engines:
                if engine is not late and engine.id in engine.control.core._sessions:
                    engine.control.core.renew_session(engine.ref, engine.tenant)
            for control in self.world.controls:
                control.core.tick()
                control.flush()
        assert late.id not in late.control.core._sessions
        self.retire(late)

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS, num_operations=st.integers(1, 3))
    def step(self, rng: Random, num_operations: int) -> None:
        engine = rng.choice(self.engines)
        self.send_step(engine, rng, num_operations, loses=True)

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS)
    def submit_receipts(self, rng: Random) -> None:
        """Some, in any order, some of them for good lost; or old ones again."""
        engine = rng.choice(self.engines)
        if not self.ready_to_send(engine):
            return
        receipts = rng.sample(engine.receipts, rng.randint(0, len(engine.receipts)))
        if engine.receipts and rng.random() < 0.2:
            engine.receipts.remove(rng.choice(engine.receipts))
        if engine.old_receipts:
            receipts.append(rng.choice(engine.old_receipts))
        engine.submit(receipts, rng=rng, deferred=rng.random() < 0.5)

    @precondition(lambda self: any(engine.old_tokens for engine in self.engines))
    @rule(rng=RANDOMS)
    def submit_old_tokens(self, rng: Random) -> None:
        """Deferred tokens of long ago, with a new number: known by now, or refused."""
        engine = rng.choice([engine for engine in self.engines if engine.old_tokens])
        if not self.ready_to_send(engine):
            return
        old = rng.choice(engine.old_tokens)
        is_of_others = False
        for i, admitted_by, first, tokens in deferred_of(old):
            known = engine.sequences.get(i)
            if known is None or known.admitted_by != admitted_by:
                is_of_others = True
            elif known.tokens[first : first + len(tokens)] != tokens:
                return  # an abort has cut the sequence since, and it went on otherwise
        before = engine.everything()
        request = cpb.SubmitReceiptsRequest()
        request.deferred_tokens.CopyFrom(old)
        try:
            answer = engine.call("submit_receipts", request)
        except SequenceNotFoundError:
            assert is_of_others
            assert engine.everything() == before
        except InvalidRequestError:
            pass  # an abort has cut the sequence since, and it is not so far again
        else:
            assert not is_of_others or answer is None, "tokens of an earlier sequence were taken"

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS, resync=st.booleans())
    def abort(self, rng: Random, resync: bool) -> None:
        engine = rng.choice(self.engines)
        if not self.ready_to_send(engine):
            return
        receipts = engine._take(None) if rng.random() < 0.5 else []
        if resync:
            engine.call("resync", cpb.ResyncRequest(receipts=receipts), rng)
            return
        session = engine.control.core._sessions.get(engine.id)
        if session is not None and session.plans:
            number = rng.choice(sorted(session.plans))
            request = cpb.AbortPlanRequest(plan_number=number, receipts=receipts)
            try:
                engine.call("abort_plan", request, rng)
            except KvplaneError as error:
                assert receipts and error.reason == "PLAN_RECEIPTED", error

    # Plans

    @precondition(lambda self: self.engines or self.gone)
    @rule(rng=RANDOMS, num=st.integers(1, 6), skip=st.booleans())
    def run_plans(self, rng: Random, num: int, skip: bool) -> None:
        """Parts of plans, on one shard, at the process that is there or at another one."""
        engine = rng.choice(self.engines + self.gone)
        index = rng.randrange(len(engine.epochs))
        found = [p for p in self.world.processes if p.executor.epoch == engine.epochs[index]]
        others = [p for p in self.world.processes if p.shard.index == index]
        process = rng.choice(found * 9 + others)
        for _ in range(num):
            engine.advance(index, process, skip=skip)

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS)
    def run_all_plans(self, rng: Random) -> None:
        rng.choice(self.engines).run_all()

    @precondition(lambda self: self.engines)
    @rule(rng=RANDOMS, num_steps=st.integers(2, 10))
    def serve(self, rng: Random, num_steps: int) -> None:
        """Steps that nothing disturbs, each run and receipted before the next, or one behind."""
        engine = rng.choice(self.engines)
        is_behind = rng.random() < 0.5
        for _ in range(num_steps):
            if engine.ended:
                return
            if not is_behind or len(engine.plans) > 1:
                engine.run_all()
            self.send_step(engine, rng, rng.randint(1, 3))
        engine.run_all()

    # Late duplicates

    @precondition(lambda self: any(engine.sent for engine in self.engines + self.gone))
    @rule(rng=RANDOMS)
    def requests_arrive_again(self, rng: Random) -> None:
        """At the control plane that answered them, or at another one."""
        engine = rng.choice([engine for engine in self.engines + self.gone if engine.sent])
        for sent in [*rng.sample(engine.sent, min(2, len(engine.sent))), *engine.sent[-3:]]:
            self.repeat(engine, sent, rng.choice([engine.control] * 2 + self.world.controls))

    @precondition(lambda self: self.closed)
    @rule(rng=RANDOMS)
    def a_closing_arrives_again(self, rng: Random) -> None:
        ref, tenant = rng.choice(self.closed)
        for control in self.world.controls:
            before = sorted(control.core._sessions)
            try:
                control.core.close_session(wire(ref), tenant)
            except (StaleIncarnationError, SessionNotFoundError):
                pass
            assert sorted(control.core._sessions) == before

    @precondition(lambda self: any(engine.starts for engine in self.engines + self.gone))
    @rule(rng=RANDOMS)
    def plans_arrive_again(self, rng: Random) -> None:
        """At the process that had them, or at another one."""
        engine = rng.choice([engine for engine in self.engines + self.gone if engine.starts])
        process, made = rng.choice(engine.starts[-6:])
        index = process.shard.index
        if rng.random() < 0.3:
            process = rng.choice([p for p in self.world.processes if p.shard.index == index])
        before = process.snapshot()
        is_refused = bool(engine.refusal(index, process))
        try:
            process.executor.open(wire(engine.grant))
            assert not is_refused, "the grant of an ended session was taken"
            started = process.executor.start(engine.id, wire(made.signed))
        except (PlanOutOfOrderError, PlanConflictError):
            assert made.number < engine.newest[index]
        except KvplaneError as error:
            assert is_refused, f"a plan that arrives again: {error!r}"
        else:
            if started.receipt is not None and not engine.ended:
                engine.receipts.append(started.receipt)
        assert process.snapshot() == before, "a plan that arrived again changed something"

    @precondition(lambda self: any(engine.layer_calls for engine in self.engines + self.gone))
    @rule(rng=RANDOMS)
    def layers_arrive_again(self, rng: Random) -> None:
        engine = rng.choice([e for e in self.engines + self.gone if e.layer_calls])
        call = rng.choice(engine.layer_calls[-8:])
        executor = call.process.executor
        before = call.process.snapshot()
        is_latest = call.plan_number == engine.newest[call.process.shard.index]
        is_served = is_latest and call.session_id not in call.process.ended
        try:
            executor.layer(
                call.session_id,
                call.layer,
                call.query,
                call.key,
                call.value,
                plan_number=call.plan_number,
            )
        except (PlanOutOfOrderError, StaleError) as error:
            assert not is_served, f"a layer that arrives again: {error!r}"
        else:
            assert is_served, "a layer of another plan than the latest was taken"
        assert call.process.snapshot() == before, "a layer that arrived again changed something"

    @rule(rng=RANDOMS)
    def registration_messages_arrive_again(self, rng: Random) -> None:
        """Publications and fences at data planes, finished fences at control planes."""
        process, control = rng.choice(self.world.processes), rng.choice(self.world.controls)
        executor = process.executor
        for message in process.publications[-3:]:
            executor.publish(wire(message))
        for fence in process.fences[-3:]:
            executor.fence(wire(fence.session), fence.ordinal)
        for done in process.fences_done[-3:]:
            try:
                control.core.fence_done(POOL, process.shard.index, executor.epoch, wire(done))
            except KvplaneError as error:
                assert error.reason in ("STALE_EPOCH", "POOL_NOT_FOUND"), error
        control.flush()

    @rule(rng=RANDOMS, really=RARELY)
    def a_hello_arrives_again(self, rng: Random, really: bool) -> None:
        """On a connection that then breaks."""
        told = [process for process in self.world.processes if process.hellos]
        if not really or not told:
            return
        process, control = rng.choice(told), rng.choice(self.world.controls)
        ghost = None
        try:
            ghost = control.open(process, wire(rng.choice(process.hellos)))
        except KvplaneError as error:
            self.check_refused(error)
        if ghost is not None and rng.random() < 0.7:
            control.close(ghost)

    @rule(rng=RANDOMS, really=RARELY)
    def a_report_comes_unasked(self, rng: Random, really: bool) -> None:
        registered = [
            process
            for process in self.world.processes
            if process.stream is not None and not process.stream.to_data
        ]
        if really and registered:
            process = rng.choice(registered)
            assert process.stream is not None
            process.report(process.stream)

    # Streams

    @rule(rng=RANDOMS, num_messages=st.integers(1, 8))
    def deliver(self, rng: Random, num_messages: int) -> None:
        self.world.deliver(rng, num_messages)

    @rule()
    def deliver_all(self) -> None:
        self.world.deliver_all()

    @rule(rng=RANDOMS, notices=st.booleans(), really=RARELY)
    def break_a_stream(self, rng: Random, notices: bool, really: bool) -> None:
        """One end leaves; the other notices at once, or when it connects anew."""
        streams = [s for s in self.world.streams() if s.is_read_by_control or s.is_read_by_data]
        if not really or not streams:
            return
        stream = rng.choice(streams)
        if notices:
            stream.control.close(stream)
        if stream.is_read_by_data:
            stream.process.stream = None

    @rule(rng=RANDOMS, anywhere=RARELY)
    def connect(self, rng: Random, anywhere: bool) -> None:
        """A data plane registers: the latest of a shard with the latest control plane, or, if
        ``anywhere``, one that was replaced, or with one that was.
        """
        index = rng.randrange(len(self.world.shards))
        process, control = self.world.latest(index), self.world.control
        if anywhere:
            process = rng.choice(self.world.processes)
            control = rng.choice(self.world.controls)
        elif process.stream is not None and process.stream.is_read_by_control and rng.random() < 0.8:
            return
        try:
            self.world.connect(process, control)
        except KvplaneError as error:
            self.check_refused(error)

    @rule()
    def mend(self) -> None:
        self.world.mend()

    # Restarts

    @rule(rng=RANDOMS, really=RARELY)
    def restart_a_data_plane(self, rng: Random, really: bool) -> None:
        """Another process comes, of another size perhaps; the old one is there still."""
        if not really:
            return
        index = rng.randrange(len(self.world.shards))
        num_device, num_host = self.world.sizes[index]
        num_device = max(3, num_device + rng.choice([-4, -1, 0, 0, 1, 4]))
        num_host = max(0, num_host + rng.choice([-3, 0, 0, 3]))
        self.world.sizes[index] = num_device, num_host
        process = self.world.restart_data(index)
        if rng.random() < 0.8:
            try:
                self.world.connect(process, self.world.control)
            except KvplaneError as error:
                self.check_refused(error)

    @rule(rng=RANDOMS, same=RARELY, really=RARELY)
    def restart_the_control_plane(self, rng: Random, same: bool, really: bool) -> None:
        """Another one comes, of a higher incarnation or, ``same``, of the same; the old ones are
        there still.
        """
        if not really:
            return
        control = self.world.restart_control(self.world.control.incarnation + (not same))
        self.forget_controls()
        for index in range(len(self.world.shards)):
            if rng.random() < 0.7:
                try:
                    self.world.connect(self.world.latest(index), control)
                except KvplaneError as error:
                    self.check_refused(error)

    @rule(rng=RANDOMS, really=RARELY)
    def a_wrong_shard_comes(self, rng: Random, really: bool) -> None:
        """One that overlaps with another, or leaves a part out, or divides the pool otherwise."""
        if not really:
            return
        index = rng.randrange(len(self.world.shards))
        num = len(self.world.shards)
        shard = rng.choice(
            [
                Shard(index, num, 0, NUM_LAYERS, 0, 2),
                Shard(index, num, 0, NUM_LAYERS, 0, 1),
                Shard(index, num, 0, 1, 1, 1),
                Shard(0, 3 - num, 0, NUM_LAYERS, 1, 1),
            ]
        )
        if shard in self.world.shards:
            return
        process = self.world.restart_data(index, shard)
        try:
            self.world.connect(process, rng.choice(self.world.controls))
        except KvplaneError as error:
            self.check_refused(error)

    # What always holds

    @invariant()
    def all_is_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            for engine in self.engines:
                engine.check()

    def teardown(self) -> None:
        """When all faults have ended, nothing is held and a session can have the whole pool."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for engine in self.engines:
            engine.close()
        world.mend()
        control = world.control
        for engine in self.engines + self.gone:
            assert engine.id not in control.core._sessions
        self.check_all_is_free(control)
        engine = Engine(world, control, ("bob", "last"))
        tokens = [5] * (world.num_device * BLOCK)
        result = engine.step(ops.admit(1, tokens))
        assert result is not None
        assert not result.results[0].failures, result.results[0].failures
        engine.run_all()
        engine.submit()
        assert engine.lookup(tokens) == len(tokens) - 1
        engine.close()
        world.deliver_all()
        self.check_all_is_free(control)
        world.check()

    # Helpers

    def check_all_is_free(self, control: ControlProcess) -> None:
        for usage in control.core.describe_pool(POOL).usage.tiers:
            num_idle = usage.num_free_blocks + usage.num_cached_blocks
            assert num_idle == usage.num_blocks, usage

    def open(self, control: ControlProcess, rng: Random) -> None:
        if len(self.engines) >= MAX_ENGINES:
            return
        try:
            self.engines.append(Engine(self.world, control, rng.choice(OWNERS)))
        except (PoolNotReadyError, SessionNotFoundError) as error:
            assert not control.ready, error
        except KvplaneError as error:
            assert error.reason == "POOL_NOT_FOUND", error

    def close(self, engine: Engine) -> None:
        engine.close()
        self.closed.append((engine.ref, engine.tenant))
        self.retire(engine)

    def retire(self, engine: Engine) -> None:
        """Its messages may still be on their way."""
        engine.ended = True
        self.engines.remove(engine)
        self.gone.append(engine)
        del self.gone[:-MAX_GONE]

    def forget_controls(self) -> None:
        """Engines of control planes that are no more have nobody to ask."""
        for engine in [e for e in self.engines if e.control not in self.world.controls]:
            self.retire(engine)

    def ready_to_send(self, engine: Engine) -> bool:
        """Have what was not answered answered. Whether the session is still open."""
        if engine.unanswered is not None:
            try:
                engine.retry()
            except KvplaneError as error:
                assert error.reason in ("TOO_MANY_PLANS_IN_FLIGHT", "PLAN_RECEIPTED"), error
        if engine.ended and engine in self.engines:
            self.retire(engine)
        return not engine.ended

    def send_step(
        self, engine: Engine, rng: Random, num_operations: int, *, loses: bool = False
    ) -> None:
        if not self.ready_to_send(engine):
            return
        operations = [self.operation(rng, engine) for _ in range(num_operations)]
        receipts = None if not loses or rng.random() < 0.7 else []
        try:
            engine.step(
                *operations,
                rng=rng if loses else None,
                deferred=rng.random() < 0.7,
                receipts=receipts,
            )
        except TooManyPlansInFlightError:
            self.world.happened["too many plans"] += 1
        else:
            self.world.happened["steps"] += 1
        if engine.ended:
            self.retire(engine)

    def repeat(self, engine: Engine, sent: Sent, control: ControlProcess) -> None:
        """A request arrives again: it is answered as before, or refused, and changes nothing."""
        before = engine.everything() if engine.control is control else ()
        session = engine.id in control.core._sessions
        try:
            answer = wire(getattr(control.core, sent.method)(wire(sent.request), engine.tenant))
        except StepOutOfOrderError:
            assert session
            assert sent.request.number < engine.number - 3, "an answer was forgotten"
        except (StaleError, SessionNotFoundError) as error:
            assert control is not engine.control or not session, error
        except KvplaneError as error:
            assert control is engine.control, f"taken by another control plane: {error!r}"
            assert str(error) == str(sent.error)
        else:
            assert control is engine.control, "taken by another control plane"
            assert answer == sent.answer
        if engine.control is control:
            assert engine.everything() == before, "a request that arrived again changed something"

    def check_refused(self, error: KvplaneError) -> None:
        """Why a data plane may be refused."""
        assert isinstance(
            error,
            (StaleEpochError, StaleIncarnationError, InvalidRequestError, LayoutMismatchError),
        ), error
        self.world.happened[f"hellos refused: {error.reason}"] += 1

    def operation(self, rng: Random, engine: Engine) -> cpb.Operation:
        """A change that makes sense most of the time."""
        live = sorted(engine.sequences)
        unused = [i for i in range(1, 5) if i not in live]
        kinds = ["admit"] * (2 if len(live) < 3 else 1)
        if live:
            kinds += ["append"] * 4 + ["fork", "swap", "free"]
        kind = rng.choice(kinds)
        if kind == "admit":
            return ops.admit(
                rng.choice((unused or [9]) + live[:1]),
                [rng.choice([0, 1])] * rng.choice([1, 7, 8, 9, 16, 17, 24, 32, 45])
                + rng.choice([[], [], [2], [0] * 8, [1] * 8]),
                num_compute_tokens=rng.choice([None, None, None, None, 0, 8, 11]),
                max_total_tokens=rng.choice([0, 0, 0, 20, 48]),
                skip_prefix_lookup=rng.random() < 0.1,
            )
        sequence_id = rng.choice(live)
        if kind == "append":
            return self.growth(rng, sequence_id, engine.sequences[sequence_id])
        if kind == "fork":
            return ops.fork(sequence_id, rng.choice((unused or [9]) + live[:1]))
        if kind == "free":
            return ops.free([sequence_id])
        tier = engine.sequences[sequence_id].tier
        same = [i for i in live if engine.sequences[i].tier == tier]
        chosen = rng.sample(same, rng.randint(1, len(same)))
        return ops.swap_out(chosen) if tier == DEVICE else ops.swap_in(chosen)

    def growth(self, rng: Random, sequence_id: int, known: Known) -> cpb.Operation:
        """An append, now and then at a position where the sequence was, or will be."""
        ahead = known.tokens[known.num_known : known.num_scheduled]
        tokens = list(ahead) if rng.random() < 0.5 else []
        if len(tokens) == len(ahead):
            tokens += [rng.choice([0, 1])] * rng.choice([0, 1, 1, 2, 9])
        first = known.num_scheduled
        if rng.random() < 0.05:
            first += rng.choice([-1, 1])
        num_slots = rng.choice([0, 1, 1, 1, 2, 8, 10])
        return ops.append(sequence_id, tokens, num_slots, first_position=max(0, first))
