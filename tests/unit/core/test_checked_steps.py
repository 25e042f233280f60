"""A check says what the step that follows answers, and changes nothing.

Two cores get the same steps. One of them is checked before each step; the other is never asked, and
must answer every step alike. The walk over both planes (``tests/helpers/planes``) checks steps in
random states.
"""

from __future__ import annotations

from kvplane import ops
from kvplane.errors import KvplaneError
from kvplane.slices import run_to_end
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import BLOCK
from tests.helpers.core.core_model import Engine, World
from tests.helpers.planes.planes_engine import Outcome, failures_of, outcome_of


def prompt(num_blocks: int, branch: int) -> range:
    return range(1000 * branch, 1000 * branch + num_blocks * BLOCK)


# The pool has nine device blocks, and a session two plans in flight.
STEPS: tuple[tuple[str, cpb.Operation, str], ...] = (
    ("ann", ops.admit(1, prompt(5, 1)), "OK"),
    ("bob", ops.admit(1, prompt(2, 2)), "OK"),
    ("kim", ops.admit(1, prompt(1, 3)), "OK"),
    ("kim", ops.fork(1, 2), "OK"),
    ("kim", ops.free([2]), "TOO_MANY_PLANS_IN_FLIGHT"),
    ("dan", ops.admit(1, prompt(3, 4), wait=True), "SHORTAGE_REASON_BLOCKS"),
    ("eve", ops.admit(1, prompt(2, 5), wait=True), "SHORTAGE_REASON_QUEUE"),
    ("eve", ops.admit(2, prompt(1, 6)), "SHORTAGE_REASON_QUEUE"),
    ("dan", ops.admit(1, prompt(10, 4)), "SHORTAGE_REASON_BLOCKS"),
    ("ann", ops.append(1, [], 3 * BLOCK, first_positions=5 * BLOCK), "SHORTAGE_REASON_BLOCKS"),
    ("bob", ops.append(1, [], 1, first_positions=2 * BLOCK), "SHORTAGE_REASON_BLOCKS"),
    ("ann", ops.append(1, [], 1, first_positions=7), "POSITION_MISMATCH"),
    ("kim", ops.admit(9, prompt(1, 6)), "TOO_MANY_PLANS_IN_FLIGHT"),
    ("ann", ops.swap([1], "host"), "SHORTAGE_REASON_BLOCKS"),
    ("ann", ops.truncate(1, 9), "OK"),
    ("bob", ops.free([1]), "OK"),
)


class Core:
    """One core, and the engines of all steps."""

    def __init__(self) -> None:
        world = World(num_device=9, num_host=1, max_plans_in_flight=2)
        self.core = world.core
        self.engines = {name: world.engine(name) for name, *_ in STEPS}

    def check(self, name: str, operation: cpb.Operation) -> Outcome:
        """Return what a check says that the engine's next step would be answered."""
        engine = self.engines[name]
        request = cpb.StepRequest(session=engine.ref, operations=[operation], validate_only=True)
        return outcome_of(run_to_end(self.core.validate(request, engine.tenant)))

    def step(self, name: str, operation: cpb.Operation) -> Outcome:
        engine: Engine = self.engines[name]
        try:
            return outcome_of(engine.step(operation))
        except KvplaneError as error:
            return failures_of(error), cpb.AdmitResult()


def reason_of(outcome: Outcome) -> str:
    failures, _ = outcome
    if not failures:
        return "OK"
    if failures[0].HasField("shortage"):
        return cpb.ShortageReason.Name(failures[0].shortage.reason)
    return failures[0].error.reason


def test_a_check_says_what_the_step_answers_and_changes_nothing() -> None:
    checked, never_checked = Core(), Core()
    for name, operation, reason in STEPS:
        for other_name, other, _ in STEPS:
            checked.check(other_name, other)
        foreseen = checked.check(name, operation)
        done = checked.step(name, operation)
        assert reason_of(done) == reason, (name, operation, done)
        assert foreseen == done
        assert done == never_checked.step(name, operation), "the checks before changed something"
