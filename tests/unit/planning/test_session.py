"""A session: what it held when it ended, and why it ended is told to its tenant alone."""

from __future__ import annotations

from control_plane.sessions.session import Session
from kvplane import ops
from kvplane.errors import SessionExpiredError, SessionNotFoundError
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.planning_rig import HOST, PlanningRig


def test_a_session_that_ends_retires_all_it_held_until_every_shard_has_fenced_it() -> None:
    rig = PlanningRig()
    rig.admit(1, range(20))
    rig.run()
    rig.admit(2, range(100, 110))
    rig.step(ops.fork(1, 3), ops.swap([2], "host"))
    other = rig.open(2)
    rig.end(1)
    rig.check()
    assert rig.usage() == {"free": 3, "cached": 0, "held": 0, "retired": 5}
    assert rig.usage(HOST)["retired"] == 2
    assert rig.obtainable(other) == 3
    rig.fence(1)
    rig.check()
    assert rig.usage() == {"free": 6, "cached": 2, "held": 0, "retired": 0}
    assert rig.usage(HOST)["free"] == 4


def test_a_fence_of_a_session_of_an_earlier_build_touches_no_later_one() -> None:
    rig = PlanningRig()
    rig.admit(1, range(20))
    rig.end(1)
    rig.pool.set_tiers({tpb.TIER_DEVICE: 8, HOST: 4})
    session = rig.open(2)
    rig.admit(1, range(20), session=session)
    rig.fence(1)
    assert rig.usage()["held"] == 3
    rig.check()


def test_the_fields_that_all_plans_begin_with_are_those_of_a_plan() -> None:
    session: Session = PlanningRig().session
    plan = plan_pb2.Plan.FromString(session.plan_prefix)
    assert (plan.version, plan.session, plan.pool_id) == (1, session.ref, "pool")
    assert list(plan.shard_epochs) == session.epochs
    assert plan.SerializeToString() == session.plan_prefix


def test_plans_that_were_aborted_are_remembered_a_thousand_of_them() -> None:
    session = PlanningRig().session
    for number in range(1, 2000):
        session.void(number)
    assert session.is_voided(1999)
    assert session.is_voided(1999 - 1023)
    assert not session.is_voided(1999 - 1024)


def test_why_a_session_ended_is_told_to_its_tenant_and_forgotten_in_order() -> None:
    rig = PlanningRig()
    rig.all._max_remembered = 2
    for session_id in (5, 6, 7):
        rig.all.end(rig.open(session_id, tenant="ann"), SessionExpiredError)
    assert [rig.all.has_ended(i, "ann") for i in (5, 6, 7)] == [False, True, True]
    assert not rig.all.has_ended(7, "bob")
    for session_id, tenant, error in (
        (7, "ann", SessionExpiredError),
        (7, "bob", SessionNotFoundError),
        (5, "ann", SessionNotFoundError),
    ):
        told = rig.all.error(session_id, tenant)
        assert type(told) is error
        assert told.field == "session.session_id"
