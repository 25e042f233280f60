"""A random walk of two cores that get the same requests, of which one is checked before each step.

What the check says must be what the step that follows answers. The other core is never asked, and
must answer every request alike, to the byte: a check that changed anything shows sooner or later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from control_plane import queries
from control_plane.sessions.session import Session
from control_plane.steps.operations import OPERATIONS
from kvplane.errors import KvplaneError
from kvplane.layout import LayerGroup
from kvplane.results import sequence_states
from kvplane.slices import run_to_end
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.error_messages import to_wire
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_messages import POOL, receipt_of
from tests.helpers.core.core_model import World
from tests.helpers.core.random_operations import Known, deferred_of, operation_of
from tests.helpers.planning.registration_messages import LAYOUT

PAIRS_OF_A_WORLD = 250
_OWNERS = (("ann", ""), ("ann", ""), ("ann", "adapter"), ("bob", ""))
_TWO_GROUPS = replace(
    LAYOUT,
    groups=(
        LayerGroup("full", (0, 2), 2, 8),
        LayerGroup("window", (1, 3), 2, 8, sliding_window_tokens=20),
    ),
)
# What fills a pool: an operation of each row as often as of another would leave it empty.
_BUSY = ("admit", "admit", "admit", "append", "append", "swap", "fork")
# The clock stands still but for these, so that turns end, and sequences have to yield.
_PAUSES_S = (0.01, 0.3, 1.1, 6.0, 12.0)


@dataclass
class Caller:
    """A client: its session in both cores, and the last number that it used."""

    ref: tpb.SessionRef
    tenant: str
    number: int = 0


class CheckedWalk:
    """Both cores with one pool each, and their callers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.seen: Counter[str] = Counter()
        num_blocks, num_host = rng.randint(6, 16), rng.choice((0, 3, 8))
        settings = {
            "lease_s": 120.0,
            "max_plans_in_flight": rng.choice((1, 2, 3, 3)),
            "watermark": rng.choice((0.0, 0.1, 0.2)),
            "max_operations": 8,
            "max_sequences": rng.choice((4, 65_536)),
            "max_table_entries": rng.choice((20, 4_194_304)),
            "max_tenant_blocks": rng.choice((0, 0, num_blocks // 2)),
            "max_retained_share": rng.choice((0.25, 0.1)),
            "eviction_policy": rng.choice(("lru", "reuse-rate")),
        }
        self.layout = rng.choice((LAYOUT, LAYOUT, _TWO_GROUPS))
        device, host = (num_blocks,), (num_host,)
        if self.layout is _TWO_GROUPS:
            device, host = (num_blocks, max(4, num_blocks - 3)), (num_host, num_host // 2)
        self.most_tokens = num_blocks * LAYOUT.block_size_tokens
        self.worlds = [
            World(num_device=device, num_host=host, layout=self.layout, plane=Plane, **settings)
            for _ in range(2)
        ]
        self.checked = self.worlds[0].core
        self.callers = [self._open(owner) for owner in _OWNERS[: rng.randint(2, 4)]]

    # Requests, which both cores answer alike

    def walk(self, num_pairs: int) -> None:
        """Send steps of one operation after their checks, with other events between them."""
        num_done = 0
        try:
            while num_done < num_pairs:
                if self.rng.random() < 0.5:
                    self.event()
                else:
                    self.pair(num_done)
                    num_done += 1
            for world in self.worlds:
                world.core.check_integrity()
        except Exception as error:
            error.add_note(f"seed {self.seed}, after {num_done} pairs: CheckedWalk({self.seed})")
            raise

    def pair(self, num_done: int) -> None:
        """Check an operation, then send it as a step."""
        caller = self.rng.choice(self.callers)
        operation = self.operation(caller, list(OPERATIONS)[num_done % len(OPERATIONS)])
        other = self.operation(caller, self.rng.choice(list(OPERATIONS)))
        self.check(caller, other)  # one that no step follows
        foreseen = self.check(caller, operation)
        answered = self.call(caller, "step", cpb.StepRequest(operations=[operation]))
        if isinstance(answered, KvplaneError):
            failures, admitted = failures_of(answered), cpb.AdmitResult()
        else:
            (result,) = answered.results
            failures, admitted = list(result.failures), result.admit
        assert foreseen == (failures, admitted), (operation, foreseen, failures)
        self.note(operation, failures)

    def check(
        self, caller: Caller, operation: cpb.Operation
    ) -> tuple[list[cpb.ItemFailure], cpb.AdmitResult]:
        """Return what a check of the first core says."""
        request = cpb.StepRequest(session=caller.ref, operations=[operation], validate_only=True)
        try:
            (result,) = run_to_end(self.checked.validate(request, caller.tenant)).results
        except KvplaneError as error:
            result = cpb.OperationResult(failures=failures_of(error))
        return list(result.failures), result.admit

    def note(self, operation: cpb.Operation, failures: list[cpb.ItemFailure]) -> None:
        """Count what kind of answer an operation got."""
        name = operation.WhichOneof("operation")
        for failure in failures:
            if failure.HasField("shortage"):
                reason = cpb.ShortageReason.Name(failure.shortage.reason)
                status = cpb.ItemStatus.Name(failure.status)
                self.seen[f"{name}: {status.split('_')[-1]} {reason.split('_')[-1]}"] += 1
            else:
                self.seen[f"{name}: {failure.error.reason}"] += 1
        if not failures:
            self.seen[f"{name}: OK"] += 1

    def call(self, caller: Caller, method: str, request: Any) -> Any:
        """Return the answer or the error of a numbered request."""
        caller.number += 1
        request.session.CopyFrom(caller.ref)
        request.number = caller.number
        return self.both(method, request, caller.tenant)

    def both(self, method: str, *args: Any) -> Any:
        """Return the answer or the error of both cores."""
        outcomes: list[Any] = []
        for world in self.worlds:
            try:
                outcomes.append(getattr(world.core, method)(*args))
            except KvplaneError as error:
                outcomes.append(error)
        one, other = outcomes
        if isinstance(one, KvplaneError):
            assert repr(one) == repr(other), "the checks before changed something"
        else:
            assert one == other, "the checks before changed something"
        return one

    # What happens between

    def event(self) -> None:
        """Change the state otherwise than by a pair."""
        caller = self.rng.choice(self.callers)
        dice = self.rng.random()
        if dice < 0.45:
            self.submit(caller)
        elif dice < 0.8:
            self.submit(caller)
            names = self.rng.choices(_BUSY, k=self.rng.randint(1, 3))
            operations = [self.operation(caller, name) for name in names]
            self.call(caller, "step", cpb.StepRequest(operations=operations))
        elif dice < 0.93:
            self.pass_time()
        elif dice < 0.96:
            self.call(caller, "abort_plans", cpb.AbortPlansRequest(whole_tables=True))
        elif dice < 0.98:
            if plans := list(self.session(caller).plans):
                request = cpb.AbortPlansRequest(plan_number=self.rng.choice(plans))
                self.call(caller, "abort_plans", request)
        elif len(self.callers) > 2:
            self.both("close_session", caller.ref, caller.tenant)
            self.replace([caller])
        self.deliver()

    def submit(self, caller: Caller) -> None:
        """Submit the receipts of some plans, all of them most of the time, and some tokens."""
        session = self.session(caller)
        plans = list(session.plans)
        if self.rng.random() < 0.2:
            plans = plans[: self.rng.randint(0, len(plans))]
        request = cpb.StepRequest(receipts=[receipt_of(session, n) for n in plans])
        if self.rng.random() < 0.5:
            states = sequence_states(queries.states(session))
            request.deferred_tokens.CopyFrom(deferred_of(states))
        self.call(caller, "step", request)

    def pass_time(self) -> None:
        """Let leases be renewed and time pass; sequences may be cut and sessions ended."""
        for caller in self.callers:
            self.both("renew_session", caller.ref, caller.tenant)
        pause_s = self.rng.choice(_PAUSES_S)
        for world in self.worlds:
            world.clock.now += pause_s
        self.both("tick")
        open_ids = self.checked.sessions.by_id.keys()
        self.replace([c for c in self.callers if c.ref.session_id not in open_ids])

    def replace(self, gone: Iterable[Caller]) -> None:
        """Open other sessions for those that have ended."""
        for caller in gone:
            self.callers.remove(caller)
            self.callers.append(self._open(self.rng.choice(_OWNERS)))

    def deliver(self) -> None:
        """Take the messages for the data plane, which fences at once, and do work that is left."""
        for world in self.worlds:
            world.pump()
            while world.core.work():
                pass
            world.core.check_integrity()

    def _open(self, owner: tuple[str, str]) -> Caller:
        tenant, namespace = owner
        request = cpb.OpenSessionRequest(
            pool_id=POOL, layout=self.layout.to_proto(), namespace=namespace
        )
        return Caller(self.both("open_session", request, tenant).session, tenant)

    # What operations are made of

    def session(self, caller: Caller) -> Session:
        return self.checked.sessions.by_id[caller.ref.session_id]

    def operation(self, caller: Caller, name: str) -> cpb.Operation:
        """Return a random operation of one item, of a row of ``OPERATIONS``."""
        session = self.session(caller)
        waiting: list[int] = []
        if session.queued is not None and session.queued.message is not None:
            message = session.queued.message
            waiting = [message.sequence_id, *columns.read(INT64, message.fork_sequence_ids, "")]
        known = Known(
            live={s.sequence_id: s for s in sequence_states(queries.states(session))},
            waiting=waiting,
            cut=list(session.revoked),
            most_tokens=self.most_tokens,
        )
        return operation_of(name, self.rng, known)


def failures_of(error: KvplaneError) -> list[cpb.ItemFailure]:
    """Return the error of a whole request as that of its only item."""
    wire = to_wire(error)
    wire.ClearField("next_number")  # a check has no number
    return [cpb.ItemFailure(status=cpb.ITEM_STATUS_FAILED, error=wire)]
