"""Faults of checks, each of which answers otherwise than the step, or changes something."""

from __future__ import annotations

from tests.mutants.fault import Fault

SHARING = "control_plane/sessions/pool_admission.py"
WALK = "tests/unit/core/test_checked_walk.py::test_a_check_says_what_the_step_answers"

FAULTS = (
    Fault(
        "the_queue_is_ignored",
        SHARING,
        "        num_needed = min(num_needed, self.pool.num_blocks(_DEVICE))\n",
        "        if check_as:\n            return None\n"
        "        num_needed = min(num_needed, self.pool.num_blocks(_DEVICE))\n",
        WALK,
    ),
    Fault(
        "blocked_growth_is_ignored",
        SHARING,
        "return self._queue.check_growth(session.id, family, num_needed)",
        "return True",
        WALK,
    ),
    Fault(
        "a_position_is_taken",
        SHARING,
        "ask = self._queue.check_admission if check_as else self._queue.admit",
        "ask = self._queue.admit",
        WALK,
    ),
    Fault(
        "a_growth_waits",
        SHARING,
        "        if check_as:\n            return self._queue.check_growth(",
        "        if False:\n            return self._queue.check_growth(",
        WALK,
    ),
    Fault(
        "full_sessions_are_ignored",
        "control_plane/core.py",
        "check_no_plan(session, [operations[i]])",
        "pass",
        WALK,
    ),
)
