"""The rules of the walk that deliver messages a second time, or long after their time.

A late duplicate of anything changes nothing.
"""

from __future__ import annotations

from random import Random

from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    PlanConflictError,
    PlanOutOfOrderError,
    PoolNotFoundError,
    SessionNotFoundError,
    StaleEpochError,
    StaleError,
    StaleIncarnationError,
    StepConflictError,
    StepOutOfOrderError,
)
from tests.helpers.planes.planes_engine import Engine
from tests.helpers.planes.planes_known import Sent
from tests.helpers.planes.planes_world import (
    MAX_PLANS_IN_FLIGHT,
    POOL,
    ControlProcess,
    DataProcess,
    World,
    wire,
)


class LateDuplicates(RuleBasedStateMachine):
    """Repeats messages. ``engines`` have sessions, as far as they know; ``gone`` had."""

    rng: Random
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[Engine] = []
        self.gone: list[Engine] = []

    @property
    def has_begun(self) -> bool:
        return hasattr(self, "world")

    # Requests of engines

    @precondition(lambda self: any(engine.sent for engine in self.engines + self.gone))
    @rule()
    def requests_arrive_again(self) -> None:
        """Send requests again, to the control plane that answered them or to another."""
        rng = self.rng
        engine = rng.choice([engine for engine in self.engines + self.gone if engine.sent])
        for sent in [*rng.sample(engine.sent, min(2, len(engine.sent))), *engine.sent[-3:]]:
            self.repeat(engine, sent, rng.choice([engine.control] * 2 + self.world.controls))

    @precondition(lambda self: any(engine.given_up for engine in self.engines + self.gone))
    @rule()
    def requests_arrive_late(self) -> None:
        """Send requests that their engine gave up, before others with their numbers."""
        for engine in self.engines + self.gone:
            for sent in engine.given_up:
                if sent.request.number <= engine.number and engine.unanswered is None:
                    self.repeat(engine, sent, engine.control)

    def repeat(self, engine: Engine, sent: Sent, control: ControlProcess) -> None:
        """Send a request again: it gets the same answer, or is refused, and changes nothing."""
        is_own = control is engine.control
        is_open = is_own and engine.id in control.core.sessions.by_id
        is_late = any(given_up is sent for given_up in engine.given_up)
        before = engine.everything()
        try:
            answer = wire(getattr(control.core, sent.method)(wire(sent.request), engine.tenant))
        except (StaleError, SessionNotFoundError) as error:
            assert not is_open, error
        except (StepOutOfOrderError, StepConflictError) as error:
            assert is_open
            is_old = sent.request.number < engine.number - MAX_PLANS_IN_FLIGHT
            assert is_old or is_late, f"an answer was forgotten: {error!r}"
        except KvplaneError as error:
            assert is_open, f"taken by another control plane, or after the end: {error!r}"
            assert is_late or str(error) == str(sent.error)
        else:
            assert is_open, "taken by another control plane, or after the end"
            assert is_late or answer == sent.answer
        assert engine.everything() == before, "a request that arrived again changed something"
        self.world.happened["requests repeated"] += 1

    @precondition(lambda self: self.gone)
    @rule()
    def a_closing_arrives_again(self) -> None:
        engine = self.rng.choice(self.gone)
        for control in self.world.controls:
            if engine.id in control.core.sessions.by_id:
                continue  # its control plane does not know yet that it is gone
            before = sorted(control.core.sessions.by_id)
            try:
                control.core.close_session(wire(engine.ref), engine.tenant)
            except (StaleIncarnationError, SessionNotFoundError):
                assert control is not engine.control
            assert sorted(control.core.sessions.by_id) == before

    # Plans

    @precondition(lambda self: any(engine.starts for engine in self.engines + self.gone))
    @rule()
    def plans_arrive_again(self) -> None:
        """Send plans again, to the process that had them or to another."""
        rng = self.rng
        engine = rng.choice([engine for engine in self.engines + self.gone if engine.starts])
        process, made = rng.choice(engine.starts[-6:])
        index = process.shard.index
        if rng.random() < 0.3:
            process = rng.choice([p for p in self.world.processes if p.shard.index == index])
        before = process.snapshot()
        must_refuse = bool(engine.refusal(index, process))
        try:
            process.executor.open(wire(engine.grant))
            assert not must_refuse, "the grant of an ended session was taken"
            started = process.executor.start(engine.id, wire(made.signed))
        except (PlanOutOfOrderError, PlanConflictError, BadSignatureError) as error:
            assert must_refuse or made.number < engine.newest[index], error
        except KvplaneError as error:
            assert must_refuse, f"a plan that arrives again: {error!r}"
        else:
            if started.receipt is not None:
                engine.receipts.append(wire(started.receipt))
        assert process.snapshot() == before, "a plan that arrived again changed something"
        self.world.happened["plans repeated"] += 1

    @precondition(lambda self: any(engine.layer_calls for engine in self.engines + self.gone))
    @rule()
    def layers_arrive_again(self) -> None:
        engine = self.rng.choice([e for e in self.engines + self.gone if e.layer_calls])
        call = self.rng.choice(engine.layer_calls[-8:])
        process, number, of_pass, layer, query, key, value = call
        before, executor, index = process.snapshot(), process.executor, process.shard.index
        present = engine.present.get(index)
        is_served = present == (number, of_pass) and engine.id not in process.ended
        named = {"plan_number": number, "pass_index": of_pass}
        try:
            if of_pass is not None and self.rng.random() < 0.5:
                executor.begin_pass(engine.id, of_pass, plan_number=number)
            executor.layer(engine.id, layer, query, key, value, **named)
        except (PlanOutOfOrderError, StaleError) as error:
            assert not is_served, f"a layer that arrives again: {error!r}"
        else:
            assert is_served, "a layer of another plan or pass was taken"
        assert process.snapshot() == before, "a layer that arrived again changed something"
        self.world.happened["layers repeated"] += 1

    # Registration

    @rule()
    def registration_messages_arrive_again(self) -> None:
        """Send publications and fences again to data planes, finished fences to control planes."""
        process, control = (
            self.rng.choice(self.world.processes),
            self.rng.choice(self.world.controls),
        )
        executor = process.executor
        for message in self.rng.sample(process.publications, min(3, len(process.publications))):
            executor.publish(wire(message))
        for fence in process.fences[-3:]:
            executor.fence(wire(fence.session), fence.ordinal)
        for done in process.fences_done[-3:]:
            try:
                control.core.fence_done(POOL, process.shard.index, executor.epoch, wire(done))
            except (StaleEpochError, PoolNotFoundError):
                self.world.happened["finished fences refused"] += 1
        control.flush()

    @rule()
    def a_hello_arrives_again(self) -> None:
        """Send a Hello again on a connection that then breaks."""
        told = [process for process in self.world.processes if process.hellos]
        if not told or self.rng.random() < 0.8:
            return
        process, control = self.rng.choice(told), self.rng.choice(self.world.controls)
        try:
            ghost = control.open(process, wire(self.rng.choice(process.hellos)))
        except KvplaneError as error:
            self.check_refused(error)
            return
        if self.rng.random() < 0.7:
            control.close(ghost)

    @rule()
    def a_report_comes_unasked(self) -> None:
        processes = [p for p in self.world.processes if p.stream is not None]
        if processes and self.rng.random() < 0.3:
            process = self.rng.choice(processes)
            # Between a request for a report and the report there is nothing on a stream.
            if process.stream is not None and not process.stream.to_data:
                process.report(process.stream)

    def try_to_connect(self, process: DataProcess, control: ControlProcess) -> None:
        try:
            self.world.connect(process, control)
        except KvplaneError as error:
            self.check_refused(error)

    def check_refused(self, error: KvplaneError) -> None:
        """Check why a data plane may be refused."""
        assert isinstance(error, StaleEpochError | StaleIncarnationError | InvalidRequestError)
        self.world.happened[f"hellos refused: {error.reason}"] += 1
