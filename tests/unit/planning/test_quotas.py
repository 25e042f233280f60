"""Quotas of a tenant: steps come back with time, sequences with those that are freed."""

from __future__ import annotations

import pytest
from planning_rig import PlanningRig

from control_plane.planning.config import CoreConfig
from control_plane.planning.quotas import Quotas
from kvplane import ops
from kvplane.errors import QuotaExceededError


def test_steps_come_back_with_time_up_to_those_of_a_second() -> None:
    quotas = Quotas(CoreConfig(max_tenant_steps_per_s=4.0), {})
    for _ in range(4):
        quotas.take_step("ann", 0.0)
    with pytest.raises(QuotaExceededError) as refused:
        quotas.take_step("ann", 0.0)
    assert refused.value.retry_delay_s == 0.25
    quotas.take_step("bob", 0.0)
    quotas.take_step("ann", 0.25)
    for _ in range(4):
        quotas.take_step("ann", 100.0)
    with pytest.raises(QuotaExceededError):
        quotas.take_step("ann", 100.0)


def test_sequences_count_over_all_sessions_of_the_tenant_alone() -> None:
    rig = PlanningRig(max_tenant_sequences=2)
    other, stranger = rig.open(2), rig.open(3, tenant="bob")
    rig.admit(1, [1])
    rig.admit(1, [2], session=other)
    rig.admit(1, [3], session=stranger)
    for operation in (ops.admit(2, [4]), ops.fork(1, 2)):
        (result,), _ = rig.step(operation)
        assert result.failures[0].error.reason == "QUOTA_EXCEEDED"
    rig.step(ops.free([1]), session=other)
    rig.admit(2, [4])
