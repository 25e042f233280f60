"""A random walk over both planes: the real core, real executors, and the messages between them.

Several control planes and several processes of each shard live at once, streams break, messages
come late, twice or never. Whatever happens, no engine sees a value that is not its own, what must
be refused is refused, and when all faults end the whole pool can be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvplane import ops
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    PlanReceiptedError,
    PoolNotFoundError,
    PoolNotReadyError,
    SequenceNotFoundError,
    StaleError,
    TooManyPlansInFlightError,
)
from kvplane.shard import Shard
from kvplane.wire import protocol, signing
from kvplane.wire.columns import INT32, pack, read
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.native.native_sessions import Known
from tests.helpers.planes.planes_engine import Engine
from tests.helpers.planes.planes_known import (
    DEVICE,
    deferred_of,
    lacks_a_receipt,
    unseen_cuts,
)
from tests.helpers.planes.planes_prefixes import PrefixCalls
from tests.helpers.planes.planes_values import (
    BLOCK,
    HYBRID,
    LAYOUT,
    NUM_HEADS,
    NUM_LAYERS,
    TWO_GROUPS,
)
from tests.helpers.planes.planes_world import LEASE_S, POOL, ControlProcess, World, wire

MAX_ENGINES, MAX_GONE = 4, 6
OWNERS = [("ann", ""), ("bob", ""), ("ann", ""), ("ann", "adapter"), ("bob", "")]
# Events that end sessions end the walk's story: most walks must get far before them.
RARELY = 0.4


class PlanesMachine(PrefixCalls):
    """Engines on one pool of one or two shards."""

    LAYOUTS: ClassVar = (LAYOUT, LAYOUT, TWO_GROUPS)

    @initialize(seed=st.integers(0, 2**32), num_shards=st.integers(1, 2))
    def begin(self, seed: int, num_shards: int) -> None:
        """All choices except that of rules follow from ``seed``: two walks differ from their first
        different rule on.
        """
        self.rng = rng = Random(seed)
        layout = rng.choice(self.LAYOUTS)
        num_uses = rng.choice([0, 1, 2]) if layout is not TWO_GROUPS else 0
        self.world = World(
            num_shards=num_shards,
            by_layers=layout is LAYOUT and rng.random() < 0.4,
            layout=layout,
            num_device=rng.randint(5, 12),
            num_host=rng.randint(0, 6),
            watermark=rng.choice([0.0, 0.1]),
            num_uses=num_uses,
        )
        self.first_size = self.world.sizes[0]
        self.engines = [Engine(self.world, self.world.control, owner) for owner in OWNERS[:2]]

    @property
    def has_states(self) -> bool:
        """Whether the pool keeps checkpoints of states."""
        return self.world.layout.state_group is not None

    @property
    def has_files(self) -> bool:
        """Whether data planes keep prefixes in files."""
        return self.has_begun and any(p.files for p in self.world.processes)

    # Engines

    @precondition(lambda self: len(self.engines) < MAX_ENGINES)
    @rule()
    def open_session(self) -> None:
        control = self.rng.choice([self.world.control, self.world.control, *self.world.controls])
        if control is self.world.control and not control.ready and self.rng.random() < 0.5:
            self.world.mend()
        try:
            engine = Engine(self.world, control, self.rng.choice(OWNERS))
        except (PoolNotReadyError, PoolNotFoundError) as error:
            assert not control.ready, error
        else:
            self.engines.append(engine)

    @precondition(lambda self: self.engines)
    @rule()
    def close_session(self) -> None:
        if self.rng.random() < RARELY:
            engine = self.rng.choice(self.engines)
            engine.close()
            self.retire(engine)

    @precondition(lambda self: self.engines)
    @rule()
    def let_a_lease_run_out(self) -> None:
        if self.rng.random() > RARELY / 2:
            return
        late = self.rng.choice(self.engines)
        late.may_end = True
        for control in self.world.controls:
            control.core.tick()
        for _ in range(3):  # never so far at once that a core takes itself for one that slept
            self.world.clock.now += LEASE_S * 0.4
            for engine in self.engines:
                if engine is not late and engine.id in engine.control.core.sessions.by_id:
                    engine.control.core.renew_session(engine.ref, engine.tenant)
            lack = [each for each in self.engines if lacks_a_receipt(each.control.core, each.id)]
            for control in self.world.controls:
                control.core.tick()
                control.flush()
            for engine in self.engines:  # those may have ended because a shard is silent
                pool = engine.control.pool
                if engine in lack or (pool is not None and pool.silent_shards):
                    engine.may_end |= engine.id not in engine.control.core.sessions.by_id
        assert late.id not in late.control.core.sessions.by_id
        self.retire(late)

    @precondition(lambda self: self.engines)
    @rule()
    def step(self) -> None:
        engine = self.pick()
        self.send_step(engine, self.rng.randint(1, 3), loses=True)

    @precondition(lambda self: self.engines)
    @rule()
    def check_steps(self) -> None:
        """A check says what the step after it is answered, and changes nothing."""
        engine = self.pick()
        for _ in range(self.rng.randint(1, 6)):
            if not self.ready_to_send(engine):
                return
            operation = self.operation(engine)
            if self.rng.random() < 0.05:
                self.spoil(operation)
            before = engine.everything()
            foreseen = engine.foreseen(operation)
            assert engine.everything() == before, "a check changed something"
            done = engine.outcome(operation)
            assert done is None or foreseen == done, operation

    @precondition(lambda self: self.engines)
    @rule()
    def submit_receipts(self) -> None:
        """Submit some, in any order, sometimes one lost for good, and old ones again."""
        engine, rng = self.pick(), self.rng
        if not self.ready_to_send(engine):
            return
        receipts = rng.sample(engine.receipts, rng.randint(0, len(engine.receipts)))
        if engine.receipts and rng.random() < 0.1:
            engine.receipts.remove(rng.choice(engine.receipts))
        if engine.old_receipts:
            receipts.append(rng.choice(engine.old_receipts))
        engine.step(receipts=receipts, rng=rng, deferred=rng.random() < 0.5)

    @precondition(lambda self: any(engine.old_tokens for engine in self.engines))
    @rule()
    def submit_old_tokens(self) -> None:
        """Submit deferred tokens of long ago, with a new number: known already, or refused."""
        engine = self.rng.choice([engine for engine in self.engines if engine.old_tokens])
        if not self.ready_to_send(engine):
            return
        old = self.rng.choice(engine.old_tokens[-5:])
        are_of_others = []
        cut = engine.cut | unseen_cuts(engine.control.core, engine.id)
        for i, admitted_by, first, tokens in deferred_of(old):
            if i in cut:
                continue  # deferred tokens of a sequence that was cut are ignored
            known = engine.sequences.get(i)
            are_of_others.append(known is None or known.admitted_by != admitted_by)
            if not are_of_others[-1] and known is not None:
                end = first + len(tokens)
                if end > known.num_known or known.tokens[first:end] != tokens:
                    return  # an abort has cut the sequence since
        before = engine.everything()
        try:
            engine.call("step", cpb.StepRequest(deferred_tokens=old))
        except SequenceNotFoundError:
            assert any(are_of_others)
            assert engine.everything() == before
            self.world.happened["old tokens refused"] += 1
        else:
            assert engine.ended or not any(are_of_others), "tokens of a freed sequence were taken"

    @precondition(lambda self: self.engines)
    @rule()
    def abort(self) -> None:
        """Abort a plan that is in flight, or any, or all."""
        engine, rng = self.pick(), self.rng
        if not self.ready_to_send(engine):
            return
        receipts = engine.take_receipts() if rng.random() < 0.5 else []
        if rng.random() < 0.3:
            engine.call(
                "abort_plans", cpb.AbortPlansRequest(whole_tables=True, receipts=receipts), rng
            )
            return
        session = engine.control.core.sessions.by_id.get(engine.id)
        numbers = sorted(session.plans) if session is not None and rng.random() < 0.7 else []
        number = rng.choice(numbers or range(1, engine.number + 2))
        request = cpb.AbortPlansRequest(plan_number=number, receipts=receipts)
        try:
            engine.call("abort_plans", request, rng)
        except (PlanReceiptedError, InvalidRequestError):
            assert number not in numbers or receipts

    # Plans

    @precondition(lambda self: self.engines or self.gone)
    @rule()
    def run_plans(self) -> None:
        """Run parts of plans on one shard, at the present process or at another one."""
        rng = self.rng
        engine = rng.choice(self.engines * 3 + self.gone)
        index = rng.randrange(len(engine.epochs))
        others = [p for p in self.world.processes if p.shard.index == index]
        found = [p for p in others if p.executor.epoch == engine.epochs[index]]
        if not others:
            return
        process, skip = rng.choice(found * 9 + others), rng.random() < 0.5
        for _ in range(rng.randint(1, 6)):
            engine.advance(index, process, skip=skip)

    @precondition(lambda self: any(each.pins for each in self.engines + self.gone))
    @rule()
    def read_pins(self) -> None:
        """Read what was pinned, now or earlier, at the process that it is of or at another."""
        rng = self.rng
        engine = rng.choice([each for each in self.engines + self.gone if each.pins])
        index = rng.randrange(len(engine.epochs))
        found = [p for p in self.world.processes if p.shard.index == index]
        if found:
            present = [p for p in found if p.executor.epoch == engine.epochs[index]]
            pin = rng.choice(engine.pins[-4:])
            engine.read_pins(pin, index, rng.choice(present * 9 + found))

    @precondition(lambda self: self.has_files)
    @rule()
    def write_files(self) -> None:
        """Let data planes write files of prefixes that were used."""
        for process in self.world.processes:
            if process.files is not None:
                self.world.happened["blocks in files"] += process.files.write(self.rng)

    @precondition(lambda self: self.engines)
    @rule()
    def run_all_plans(self) -> None:
        self.pick().run_all()

    @precondition(lambda self: self.engines)
    @rule()
    def serve(self) -> None:
        """Take undisturbed steps, each run and receipted before the next, or one behind."""
        engine = self.pick()
        is_behind = self.rng.random() < 0.5
        for _ in range(self.rng.randint(3, 12)):
            if engine.ended:
                return
            if not is_behind or len(engine.plans) > 1:
                engine.run_all()
            self.send_step(engine, self.rng.randint(1, 3))
        engine.run_all()

    # Streams

    @rule()
    def deliver(self) -> None:
        self.world.deliver(self.rng, self.rng.randint(1, 8))

    @rule()
    def deliver_all(self) -> None:
        self.world.deliver_all()

    @rule()
    def break_a_stream(self) -> None:
        """Let one end leave; the other notices at once, or when it connects anew."""
        streams = self.world.streams()
        if not streams or self.rng.random() > RARELY:
            return
        stream = self.rng.choice(streams)
        if self.rng.random() < 0.5:
            stream.control.close(stream)
        if stream.is_read_by_data:
            stream.process.stream = None

    @rule()
    def connect(self) -> None:
        """Register a data plane: the latest of a shard with the latest control plane, or a replaced
        one, or with a replaced one. It may stay only a moment.
        """
        rng = self.rng
        process = self.world.latest(rng.randrange(len(self.world.shards)))
        control = self.world.control
        if rng.random() < RARELY:
            process = rng.choice([process, *self.world.processes])
            control = rng.choice(self.world.controls)
        elif process.stream is not None and process.stream.is_read_by_control:
            return
        former = process.stream.control if process.stream is not None else control
        self.try_to_connect(process, control)
        if rng.random() < 0.7:
            self.world.deliver_all()
            if former is not control and rng.random() < 0.7:
                self.try_to_connect(process, former)

    @rule()
    def mend(self) -> None:
        self.world.mend()

    # Restarts

    @rule()
    def restart_a_data_plane(self) -> None:
        """Start another process, perhaps of another size; the old one remains."""
        rng = self.rng
        if rng.random() > RARELY:
            return
        index = rng.randrange(len(self.world.shards))
        num_device, num_host = self.world.sizes[index]
        others = max(3, num_device + rng.choice([-6, -2, 2])), max(0, num_host - rng.choice([0, 3]))
        for size in rng.choice([[(num_device, num_host)], [others], [others, self.first_size]]):
            self.world.sizes[index] = size
            process = self.world.restart_data(index)
            if rng.random() < 0.8:
                self.try_to_connect(process, self.world.control)
                if rng.random() < 0.7:
                    self.world.mend()

    @rule()
    def restart_the_control_plane(self) -> None:
        """Start another one, of a higher incarnation or of the same; the old ones remain."""
        rng = self.rng
        if rng.random() > RARELY:
            return
        incarnation = self.world.control.incarnation + rng.choice([0, 1, 1])
        control = self.world.restart_control(incarnation)
        for engine in [e for e in self.engines if e.control not in self.world.controls]:
            self.retire(engine)
        for index in range(len(self.world.shards)):
            if rng.random() < 0.7:
                self.try_to_connect(self.world.latest(index), control)
        if rng.random() < 0.7:
            self.world.mend()

    # Keys

    @precondition(lambda self: self.has_begun and self.engines)
    @rule()
    def forge_a_plan(self) -> None:
        """Sign a plan with the key of a session. A data plane that has another key refuses it."""
        key = self.rng.choice(self.engines + self.gone).key
        engine = self.pick()
        plan = plan_pb2.Plan(
            version=protocol.NEWEST_PAYLOAD_VERSION,
            session=engine.ref,
            pool_id=POOL,
            shard_epochs=engine.epochs,
            number=engine.number + 10,
            resync=True,
        ).SerializeToString()
        forged = tpb.SignedPayload(
            type=signing.PLAN, payload=plan, signature=signing.sign(key, signing.PLAN, plan)
        )
        for process in self.world.processes:
            executor = process.executor
            if signing.key_id(key) == executor.key_id:
                continue
            before = process.snapshot()
            try:
                executor.start(wire(engine.grant), wire(forged))
            except (BadSignatureError, StaleError, PoolNotReadyError):
                self.world.happened["forged plans refused"] += 1
            else:
                raise AssertionError("a plan is taken that another key signed")
            assert process.snapshot() == before

    @rule()
    def a_wrong_shard_comes(self) -> None:
        """Register a shard that overlaps another, leaves a part out, or divides otherwise."""
        rng = self.rng
        if rng.random() > RARELY / 2:
            return
        num = len(self.world.shards)
        index = rng.randrange(num)
        wrong = [
            Shard(index, num, 0, NUM_LAYERS, 0, NUM_HEADS),
            Shard(index, num, 0, NUM_LAYERS, 1 - index, 1),
            Shard(index, num, 0, 1, 1, 1),
            Shard(0, 3 - num, 0, NUM_LAYERS, 1, 1),
        ]
        if self.world.layout is TWO_GROUPS:
            del wrong[2]  # it has no layer of one of the groups
        shard = rng.choice([shard for shard in wrong if shard not in self.world.shards])
        process = self.world.restart_data(index, shard)
        self.try_to_connect(process, rng.choice(self.world.controls))

    # What always holds

    @invariant()
    def all_is_sound(self) -> None:
        if self.has_begun:
            self.world.check()
            for engine in self.engines:
                engine.check()

    def teardown(self) -> None:
        if self.has_begun:
            try:
                end_all(self.world, self.engines, self.gone)
            finally:
                self.world.close()

    # Helpers

    def pick(self) -> Engine:
        """Return an engine, mostly one whose plans are run."""
        served = [engine for engine in self.engines if engine.is_served]
        if served and self.rng.random() < 0.8:
            return self.rng.choice(served)
        return self.rng.choice(self.engines)

    def retire(self, engine: Engine) -> None:
        """Retire an engine, whose messages may still be on their way."""
        engine.ended = True
        self.engines.remove(engine)
        self.gone.append(engine)
        del self.gone[:-MAX_GONE]

    def ready_to_send(self, engine: Engine) -> bool:
        """Retry the unanswered request, or give it up if it never arrived. Return whether the
        session is still open.
        """
        if engine.unanswered is not None and not (
            self.rng.random() < 0.5 and engine.change_its_mind()
        ):
            try:
                engine.retry()
            except (TooManyPlansInFlightError, PlanReceiptedError, InvalidRequestError) as error:
                self.world.happened[f"answered late: {error.reason}"] += 1
        if engine.ended and engine in self.engines:
            self.retire(engine)
        return not engine.ended

    def send_step(self, engine: Engine, num_operations: int, *, loses: bool = False) -> None:
        rng = self.rng
        if not self.ready_to_send(engine):
            return
        operations = [self.operation(engine) for _ in range(num_operations)]
        submits = not loses or rng.random() < 0.7
        try:
            engine.step(
                *operations,
                rng=rng if loses else None,
                deferred=rng.random() < 0.7,
                receipts=None if submits else (),
            )
        except TooManyPlansInFlightError:
            self.world.happened["too many plans"] += 1
            if rng.random() < 0.3:
                engine.close()
        if engine.ended:
            self.retire(engine)

    def spoil(self, operation: cpb.Operation) -> None:
        """Put a byte too many into one of its columns."""
        message = getattr(operation, operation.WhichOneof("operation"))
        columns = [field.name for field, value in message.ListFields() if isinstance(value, bytes)]
        if columns:
            column = self.rng.choice(columns)
            setattr(message, column, getattr(message, column) + b"\0")

    def operation(self, engine: Engine) -> cpb.Operation:
        """Return a change that makes sense most of the time."""
        rng = self.rng
        live = sorted(engine.sequences)
        unused = [i for i in range(1, 4) if i not in live]
        kinds = ["admit"] * (2 if len(live) < 3 else 1)
        if live:
            kinds += ["append"] * 4 + ["fork", "swap", "free", "truncate"]
        kind = rng.choice([*kinds, "pin", "unpin"])
        if kind == "pin":
            theirs = [known.tokens for each in self.engines for known in each.sequences.values()]
            tokens = rng.choice([*theirs, [rng.choice([0, 1])] * 24])
            return ops.pin(rng.randint(1, 3), [tokens])
        if kind == "unpin":
            return ops.unpin(rng.sample(range(1, 4), rng.randint(1, 3)))
        if kind == "admit" and self.has_states:
            is_whole = self.has_files and rng.random() < 0.7  # what files can give
            lengths = [8, 16, 24] if is_whole else [1, 8, 9, 17, 24, 32]
            tokens = [rng.choice([0, 1])] * rng.choice(lengths)
            tokens += [2] * (0 if is_whole else rng.randint(0, 9))
            last = len(tokens) // BLOCK
            return ops.admit(
                rng.choice((unused or [9]) * 3 + live[:1]),
                tokens,
                checkpoint_position=BLOCK * (last if is_whole else rng.randint(0, last)),
                skip_prefix_lookup=rng.random() < (0.4 if self.has_files else 0),
            )
        if kind == "admit":
            return ops.admit(
                rng.choice((unused or [9]) * 3 + live[:1]),
                [rng.choice([0, 1])] * rng.choice([1, 7, 8, 9, 16, 17, 24, 32])
                + rng.choice([[], [], [2], [0] * 8, [1] * 8]),
                num_compute_tokens=rng.choice([None, None, None, None, 0, 8, 11]),
                max_total_tokens=rng.choice([0, 0, 0, 20, 48]),
                skip_prefix_lookup=rng.random() < (0.4 if self.has_files else 0.1),
            )
        sequence_id = rng.choice(live)
        if kind == "append":
            known = engine.sequences[sequence_id]
            operation = growth(rng, sequence_id, known)
            if rng.random() < 0.2 and not self.has_states:
                operation.append.num_lookahead_slots = pack(INT32, [rng.choice([1, 8, 20])])
            if self.has_states:
                first, (num,) = known.num_scheduled, read(INT32, operation.append.num_slots, "")
                ends = range((first // BLOCK + 1) * BLOCK, first + num + 1, BLOCK)
                if ends:
                    column = pack(INT32, [rng.choice(ends)])
                    operation.append.checkpoint_positions = column
            return operation
        if kind == "fork":
            return ops.fork(sequence_id, rng.choice((unused or [9]) * 3 + live[:1]))
        if kind == "free":
            return ops.free([sequence_id])
        if kind == "truncate":
            known = engine.sequences[sequence_id]
            most = max(known.num_known, known.num_scheduled)
            return ops.truncate(sequence_id, max(1, most - rng.choice([0, 1, 3, 9])))
        if self.has_states:  # which are not swapped
            return ops.free([sequence_id])
        tier = engine.sequences[sequence_id].tier
        same = [i for i in live if engine.sequences[i].tier == tier]
        chosen = rng.sample(same, rng.randint(1, len(same)))
        return ops.swap(chosen, "host") if tier == DEVICE else ops.swap(chosen, "device")


class HybridMachine(PlanesMachine):
    """The same of pools that keep states beside keys and values."""

    LAYOUTS: ClassVar = (HYBRID,)


def growth(rng: Random, sequence_id: int, known: Known) -> cpb.Operation:
    """Return an append, sometimes at a position where the sequence was, or will be."""
    ahead = known.tokens[known.num_known : known.num_scheduled]
    tokens = list(ahead) if rng.random() < 0.5 else []
    if len(tokens) == len(ahead):
        tokens += [rng.choice([0, 1])] * rng.choice([0, 1, 1, 2, 9])
    first = known.num_scheduled
    if rng.random() < 0.05:
        first += rng.choice([-1, 1])
    num_slots = rng.choice([0, 1, 1, 1, 2, 8, 10])
    return ops.append(sequence_id, tokens, num_slots, first_positions=max(0, first))


def end_all(world: World, engines: Sequence[Engine], gone: Sequence[Engine] = ()) -> None:
    """End all sessions and faults; then nothing is held and a session can have the whole pool.
    ``gone``: engines whose sessions have ended.
    """
    for engine in engines:
        engine.close()
    world.mend()
    control = world.control
    for engine in [*engines, *gone]:
        assert engine.id not in control.core.sessions.by_id
    check_all_is_free(control)
    last = Engine(world, control, ("bob", "last"))
    tokens = [5] * (world.num_device * BLOCK)
    result = last.step(ops.admit(1, tokens))
    assert result is not None
    assert not result.results[0].failures, result.results[0].failures
    last.run_all()
    last.step()
    if world.layout.state_group is None:
        assert last.lookup(tokens) == len(tokens) - 1
    last.close()
    world.deliver_all()
    check_all_is_free(control)
    world.check()


def check_all_is_free(control: ControlProcess) -> None:
    for usage in control.core.get_pool(POOL).usage:
        num_idle = usage.num_free_blocks + usage.num_cached_blocks
        assert num_idle == usage.num_blocks, f"blocks are held by nobody: {usage}"
