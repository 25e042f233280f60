"""Executors that register with the core, restart and come back: what is planned next runs on all of
them.
"""

from __future__ import annotations

import itertools

import pytest

from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from data_plane.execution.executor import Executor
from kvplane import ops
from kvplane.errors import StaleEpochError
from kvplane.shard import Shard
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, all_outgoing, hello

TENANT = "default"
EPOCHS = itertools.count(1)


def core(incarnation: int = 1) -> ControlPlane:
    return ControlPlane(incarnation=incarnation, config=CoreConfig(), clock=lambda: 0.0)


def executor(index: int = 0, num_shards: int = 1, *, num_blocks: int = 16) -> Executor:
    shard = Shard(index, num_shards, 0, 2, index, 2 // num_shards)
    return Executor(
        LAYOUT,
        pool_id="pool",
        num_device_blocks=num_blocks,
        shard=shard,
        num_threads=1,
        epoch=next(EPOCHS),
    )


def join(control: ControlPlane, plane: Executor, num_blocks: int = 16) -> rpb.Welcome:
    """Register, and report unless it was resumed."""
    welcome = control.register(
        hello(
            shard=plane.shard.to_proto(),
            epoch=plane.epoch,
            num_device_blocks=num_blocks,
            num_host_blocks=0,
            incarnation=plane.incarnation,
            key_id=plane.key_id,
        )
    )
    if not welcome.resumed:
        plane.install(welcome.incarnation, welcome.key)
        report(control, plane)
    return welcome


def report(control: ControlPlane, plane: Executor) -> None:
    for part in plane.report():
        control.report("pool", plane.shard.index, plane.epoch, part)


def deliver(control: ControlPlane, *planes: Executor) -> None:
    """Have the executors do what the core has to say to them."""
    for plane in planes:
        for message in all_outgoing(control, "pool", plane.shard.index):
            if message.HasField("fence"):
                fence = message.fence
                plane.fence(fence.session, fence.ordinal)
                done = rpb.FenceDone(session=fence.session)
                control.fence_done("pool", plane.shard.index, plane.epoch, done)
            elif message.HasField("report_request"):
                report(control, plane)
            else:
                plane.publish(message.publish.publications)


def fill_once(control: ControlPlane, num_blocks: int, *planes: Executor) -> None:
    """A session allocates so many blocks on every shard, and ends."""
    request = pb.OpenSessionRequest(
        pool_id="pool", layout=tpb.Layout(fingerprint=LAYOUT.fingerprint)
    )
    opened = control.open_session(request, TENANT)
    operations = [
        ops.admit(1, [1], num_compute_tokens=0),
        ops.append(1, first_positions=0, num_lookahead_slots=num_blocks * 8),
    ]
    step = pb.StepRequest(session=opened.session, number=1, operations=operations)
    plan = control.step(step, TENANT).plan
    for plane in planes:
        assert plane.start(opened.grant, plan).receipt is not None
    control.close_session(opened.session, TENANT)
    deliver(control, *planes)


def test_a_shard_that_comes_back_smaller_and_then_larger_has_its_plans_run_by_all() -> None:
    control = core()
    stays, goes = executor(0, 2), executor(1, 2)
    join(control, stays)
    join(control, goes)
    for _ in range(3):
        fill_once(control, 16, stays, goes)
    for num_blocks in (8, 16):
        goes = executor(1, 2, num_blocks=num_blocks)
        join(control, goes, num_blocks)
        assert not control.get_pool("pool").ready
        deliver(control, stays, goes)
        assert control.get_pool("pool").ready
        fill_once(control, num_blocks, stays, goes)
    control.check_integrity()


def test_an_older_executor_stays_out_and_the_later_one_goes_on() -> None:
    control = core()
    older, later = executor(), executor()
    join(control, older)
    fill_once(control, 8, older)
    join(control, later)
    for _ in range(3):
        with pytest.raises(StaleEpochError):
            join(control, older)
        fill_once(control, 16, later)


def test_an_executor_that_was_with_another_control_plane_of_that_incarnation_begins_anew() -> None:
    first, second = core(7), core(7)
    plane = executor()
    join(first, plane)
    first.disconnect("pool", 0, plane.epoch)
    join(second, plane)
    second.disconnect("pool", 0, plane.epoch)
    assert not join(first, plane).resumed
    fill_once(first, 4, plane)
    first.disconnect("pool", 0, plane.epoch)
    assert join(first, plane).resumed
    fill_once(first, 4, plane)
