"""A session: what it holds is what its tables say, and why it ended is told to its tenant alone."""

from __future__ import annotations

import pytest
from planning_rig import DEVICE, HOST, PlanningRig

from control_plane.blocks.block_store import CACHED, FREE, HELD, RETIRED
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import EndedSessions
from kvplane import ops
from kvplane.errors import (
    SequenceNotFoundError,
    SessionExpiredError,
    SessionNotFoundError,
)


def test_a_sequence_that_is_not_live_is_refused_by_the_field_given() -> None:
    rig = PlanningRig()
    sequence = rig.admit(7, range(5))
    assert rig.session.sequence(7, field="f") is sequence
    with pytest.raises(SequenceNotFoundError) as refused:
        rig.session.sequence(8, field="f[3]")
    assert refused.value.field == "f[3]"


def test_live_sequences_are_guaranteed_what_the_longest_of_them_needs() -> None:
    rig = PlanningRig()
    reservations = rig.pool.reservations
    long, short = (Sequence(i, 1, b"", need) for i, need in ((1, 5), (2, 3)))
    rig.session.add(long)
    rig.session.add(short)
    assert reservations.guarantee(1) == 5
    rig.session.remove(long)
    assert reservations.guarantee(1) == 3
    assert rig.session.sequences == {2: short}


def test_device_blocks_count_towards_the_guarantee_and_host_blocks_do_not() -> None:
    rig = PlanningRig()
    rig.session.add(Sequence(1, 1, b"", need=3))
    reservations = rig.pool.reservations
    device = rig.session.allocate(DEVICE, 2)
    host = rig.session.allocate(HOST, 2)
    assert reservations.shortfall(1) == 1
    rig.session.share(DEVICE, device)
    assert rig.session.release(DEVICE, device, 1) == 0, "another table refers to them still"
    assert reservations.shortfall(1) == 1
    assert rig.session.release(DEVICE, device, 1) == 2
    assert rig.session.release(HOST, host, 1) == 2
    assert reservations.shortfall(1) == 3


def test_a_session_that_ends_retires_all_it_held_until_every_shard_has_fenced_it() -> None:
    rig = PlanningRig()
    rig.admit(1, range(20))
    rig.run()
    rig.admit(2, range(100, 110))
    rig.step(ops.fork(1, 3), ops.swap_out([2]))
    other = rig.open(2)
    rig.end(1)
    rig.check()
    device, host = rig.pool.device, rig.pool.host
    assert (device.num_in[HELD], device.num_in[RETIRED], host.num_in[RETIRED]) == (0, 5, 2)
    assert not any(device.pins)
    assert device.num_obtainable(other.id) == 3
    rig.pool.fence_done(1, 0)
    rig.check()
    assert (device.num_in[FREE], device.num_in[CACHED], host.num_in[FREE]) == (6, 2, 4)
    assert rig.pool.reservations.num_reserved == 0


def test_plans_that_were_aborted_are_remembered_a_thousand_of_them() -> None:
    session = PlanningRig().session
    for number in range(1, 2000):
        session.void(number)
    assert session.is_voided(1999)
    assert session.is_voided(1999 - 1023)
    assert not session.is_voided(1999 - 1024)


def test_why_a_session_ended_is_told_to_its_tenant_and_forgotten_in_order() -> None:
    rig = PlanningRig()
    ended = EndedSessions(2)
    for session_id in (5, 6, 7):
        ended.add(rig.open(session_id, tenant="ann"), SessionExpiredError)
    assert [ended.knows(i) for i in (5, 6, 7)] == [False, True, True]
    assert ended.knows(7, "ann")
    assert not ended.knows(7, "bob")
    for session_id, tenant, error in (
        (7, "ann", SessionExpiredError),
        (7, "bob", SessionNotFoundError),
        (5, "ann", SessionNotFoundError),
    ):
        told = ended.error(session_id, tenant)
        assert type(told) is error
        assert told.field == "session.session_id"
