"""A small world of both planes, and everything that can happen in it next.

Both planes are the real ones: the planning core, and executors with their memory. Engines have a
script of operations; when each is sent, when plans run and are receipted, what arrives when, and
what ends or restarts in between, is for the explorer to choose.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from kvplane import ops
from kvplane.errors import (
    KvplaneError,
    PlanReceiptedError,
    PoolNotReadyError,
    TooManyPlansInFlightError,
)
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planes.planes_engine import Engine
from tests.helpers.planes.planes_machine import end_all
from tests.helpers.planes.planes_world import World

OWNER = ("ann", "")
OF_THE_WORLD = ("deliver", "restart data", "restart control")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario has, and which kinds of events happen in it."""

    num_engines: int
    num_blocks: int
    events: tuple[str, ...]


def script(engine: Engine, stage: int) -> cpb.Operation | None:
    """What an engine sends next: a prompt that fills a block and a slot, then a token, and the end
    of the sequence; None when it has sent all.
    """
    if stage == 0:
        return ops.admit(1, [0] * 9)
    if stage == 1:
        return ops.append(1, [1], 1, first_positions=engine.sequences[1].num_scheduled)
    return ops.free([1]) if stage == 2 else None


class Scenario:
    """One state, reached from the first by events."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.world = World(num_device=setting.num_blocks, num_host=0)
        self.engines = [self._engine() for _ in range(setting.num_engines)]
        self.stages = [0] * setting.num_engines
        self.num_restarts = 0

    def _engine(self) -> Engine:
        return Engine(self.world, self.world.control, OWNER)

    def events(self) -> list[tuple[str, int]]:
        """What can happen next: the kind of event, and the engine that it happens to, -1 for the
        world. Each kind has a method of its name, and one that says whether it can happen.
        """
        possible = []
        for kind in self.setting.events:
            can_happen = getattr(self, f"can_{kind.replace(' ', '_')}")
            if kind in OF_THE_WORLD:
                possible += [(kind, -1)] if can_happen() else []
            else:
                possible += [(kind, i) for i in range(len(self.engines)) if can_happen(i)]
        return possible

    def happen(self, kind: str, index: int) -> None:
        """Let it happen. Raises AssertionError, or an error of the core's, for what must not be."""
        event = getattr(self, kind.replace(" ", "_"))
        if kind in OF_THE_WORLD:
            event()
        else:
            event(index)
        self.world.check()
        for engine in self.engines:
            engine.check()

    def finish(self) -> None:
        """All end and arrive: then nothing is held, and a session can have the whole pool."""
        end_all(self.world, self.engines)

    # Engines

    def can_step(self, i: int) -> bool:
        engine = self.engines[i]
        if engine.ended or self.stages[i] > 2 or len(engine.plans) > 2:
            return False
        return self.stages[i] == 0 or 1 in engine.sequences

    def step(self, i: int) -> None:
        engine = self.engines[i]
        operation = script(engine, self.stages[i])
        assert operation is not None
        try:
            result = engine.step(operation, receipts=())
        except TooManyPlansInFlightError:
            return
        if result is not None and not result.results[0].failures:
            self.stages[i] += 1

    def can_advance(self, i: int) -> bool:
        return self.engines[i].next_plan(0) is not None

    def advance(self, i: int) -> None:
        """Start its next plan, or run a layer of it, on the process that it was made for."""
        engine = self.engines[i]
        of_epoch = {process.executor.epoch: process for process in self.world.processes}
        engine.advance(0, of_epoch[engine.epochs[0]])

    can_run = can_advance

    def run(self, i: int) -> None:
        """Run all that it has."""
        self.engines[i].run_all()

    def can_submit(self, i: int) -> bool:
        return bool(self.engines[i].receipts) and not self.engines[i].ended

    def submit(self, i: int) -> None:
        self.engines[i].step()

    def can_abort(self, i: int) -> bool:
        engine = self.engines[i]
        session = engine.control.core.sessions.by_id.get(engine.id)
        return not engine.ended and session is not None and bool(session.plans)

    def abort(self, i: int) -> None:
        engine = self.engines[i]
        number = min(engine.control.core.sessions.by_id[engine.id].plans)
        try:
            engine.call("abort_plans", cpb.AbortPlansRequest(plan_number=number))
        except PlanReceiptedError as error:
            raise AssertionError("a plan in flight has been receipted") from error
        if 1 not in engine.sequences:
            self.stages[i] = 0

    def can_repeat(self, i: int) -> bool:
        return bool(self.engines[i].sent) and not self.engines[i].ended

    def repeat(self, i: int) -> None:
        """Its last request arrives again, and is answered as it was."""
        engine = self.engines[i]
        sent, before = engine.sent[-1], engine.everything()
        again = getattr(engine.control.core, sent.method)(sent.request, engine.tenant)
        assert again == sent.answer, "a repeated request has another answer"
        assert engine.everything() == before, "a repeated request changed something"

    def can_start_again(self, i: int) -> bool:
        return bool(self.engines[i].starts)

    def start_again(self, i: int) -> None:
        """Its first plan comes again, and changes nothing, whether or not it is refused."""
        engine = self.engines[i]
        process, made = engine.starts[0]
        before = process.snapshot()
        with contextlib.suppress(KvplaneError):
            process.executor.start(engine.id, made.signed)
        assert process.snapshot() == before, "an old plan changed memory"

    def can_grant_again(self, i: int) -> bool:
        process = self.world.latest(0)
        return self.engines[i].ended and self.engines[i].id in process.ended

    def grant_again(self, i: int) -> None:
        """Its grant comes again after its fence, and is refused."""
        engine, process = self.engines[i], self.world.latest(0)
        try:
            process.executor.open(engine.grant)
        except KvplaneError:
            return
        raise AssertionError("a session that was fenced is open again")

    def can_close(self, i: int) -> bool:
        return not self.engines[i].ended

    def close(self, i: int) -> None:
        """It ends its session: its blocks retire until the fence is done."""
        self.engines[i].close()

    def can_open(self, i: int) -> bool:
        return self.engines[i].ended and self.world.control.ready

    def open(self, i: int) -> None:
        """Another session takes its place; plans of the former may still come."""
        try:
            self.engines[i] = self._engine()
        except PoolNotReadyError:
            return
        self.stages[i] = 0

    # The world

    def can_deliver(self) -> bool:
        return any(stream.to_control or stream.to_data for stream in self.world.streams())

    def deliver(self) -> None:
        """One message arrives, of the data plane's first."""
        for stream in self.world.streams():
            if stream.to_data:
                stream.process.receive(stream)
                return
            if stream.to_control:
                stream.control.receive(stream)
                return

    def can_restart_data(self) -> bool:
        return self.num_restarts < 1

    can_restart_control = can_restart_data

    def restart_data(self) -> None:
        self.num_restarts += 1
        former, process = self.world.latest(0), self.world.restart_data(0)
        self.world.leave(former)
        self.world.connect(process, self.world.control)

    def restart_control(self) -> None:
        self.num_restarts += 1
        control = self.world.restart_control(self.world.control.incarnation + 1)
        self.world.connect(self.world.latest(0), control)

    def state(self) -> tuple[object, ...]:
        """What is to come depends on this alone: without the numbers that only grow."""
        control, process = self.world.control, self.world.latest(0)
        engines = tuple(self._engine_state(i) for i in range(len(self.engines)))
        queues = tuple(
            (
                stream.control.incarnation,
                stream.epoch,
                tuple(m.WhichOneof("message") for m in stream.to_control),
                tuple(m.WhichOneof("message") for m in stream.to_data),
            )
            for stream in self.world.streams()
        )
        pool = control.pool
        usage = "" if pool is None else str(pool.usage())
        tables = process.executor._tables
        place = next(iter(tables.generations))
        return (
            engines,
            queues,
            usage,
            control.incarnation,
            process.executor.epoch,
            process.executor.incarnation,
            tables.ref_counts[place].tobytes(),
            tables.stale_counts[place].tobytes(),
            tables.num_written[place].tobytes(),
            tables.publications[0].published.tobytes(),
        )

    def _engine_state(self, i: int) -> tuple[object, ...]:
        engine, process = self.engines[i], self.world.latest(0)
        session = engine.control.core.sessions.by_id.get(engine.id)
        plans = () if session is None else tuple(engine.number - n for n in session.plans)
        made = tuple(
            (
                engine.number - m.number,
                tuple(m.plan.changes.kinds),
                m.plan.changes.indices,
                tuple((r.finished, r.process is process) for r in m.runs.values()),
                tuple(r.next_layer for r in m.runs.values()),
            )
            for m in engine.plans
        )
        receipts = tuple(
            engine.number - plan_pb2.Receipt.FromString(r.payload).plan_number
            for r in engine.receipts
        )
        table = process.executor._tables.of_session(engine.id).get(1)
        return (
            self.stages[i],
            engine.ended,
            session is not None and (plans, engine.number - session.done, session.resync_due),
            made,
            receipts,
            engine.number - engine.newest[0] if engine.newest[0] else None,
            None if table is None else table.blocks.tobytes(),
            engine.id in process.ended,
            engine.id in process.executor._sessions,
            bool(engine.starts),
            tuple((k, v.num_known, v.num_scheduled) for k, v in engine.sequences.items()),
        )
