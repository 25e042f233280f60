"""Whatever fails, comes late, twice or back: no engine sees a value that is not its own, and when
it is over the whole pool can be had. See ``planes_machine``.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from planes_machine import PlanesMachine


def test_no_engine_sees_what_is_not_its_own() -> None:
    walk(max_examples=80, derandomize=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_longer_walks() -> None:
    walk(max_examples=4000)


def walk(*, max_examples: int, derandomize: bool = False) -> None:
    """A failure is shown as it was found: to shorten it takes minutes."""
    run_state_machine_as_test(
        PlanesMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=80,
            deadline=None,
            derandomize=derandomize,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
