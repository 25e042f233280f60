"""Planes of different releases use a payload version that all of them know, or do not register."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.pools import payload_versions
from control_plane.pools.payload_versions import payload_version
from control_plane.sessions import sessions
from control_plane.sessions.session import Session
from data_plane.plans.verifier import Verifier
from kvplane import ops
from kvplane.errors import InvalidRequestError, ProtocolMismatchError
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_messages import POOL
from tests.helpers.core.core_model import Engine, World
from tests.helpers.planning.registration_messages import half, hello
from tests.helpers.refusals import refused

LATER_FIELD = b"\x78\x01"  # field 15 of a plan, a number


def release(monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int) -> None:
    """Make the control plane one of another release, which knows these payload versions."""
    monkeypatch.setattr(payload_versions, "OLDEST_PAYLOAD_VERSION", oldest)
    monkeypatch.setattr(payload_versions, "NEWEST_PAYLOAD_VERSION", newest)
    monkeypatch.setattr(payload_versions, "release", lambda: "0.7.0+gc0")


def of(oldest: int, newest: int, version: str = "0.6.0+gda") -> dict[str, Any]:
    """Fields of a data plane's Hello."""
    return {
        "version": version,
        "oldest_payload_version": oldest,
        "newest_payload_version": newest,
    }


@pytest.mark.parametrize(
    ("control", "planes", "used"),
    [
        ((1, 1), [(1, 1)], 1),
        ((1, 2), [(1, 1)], 1),  # the control plane was updated first
        ((1, 1), [(1, 2)], 1),  # the data plane was
        ((2, 3), [(2, 3), (1, 2)], 2),  # one shard of two was
        ((2, 3), [(3, 4), (2, 3)], 3),
    ],
)
def test_the_newest_version_that_all_know_is_used(
    monkeypatch: pytest.MonkeyPatch,
    control: tuple[int, int],
    planes: list[tuple[int, int]],
    used: int,
) -> None:
    release(monkeypatch, *control)
    assert payload_version(hello(**of(*plane)) for plane in planes) == used


@pytest.mark.parametrize(
    ("control", "plane", "text"),
    [
        (
            (2, 3),
            (1, 1),
            "the data plane '0.6.0+gda' knows payload versions up to 1, and the control plane "
            "'0.7.0+gc0' from 2 on: update the data plane '0.6.0+gda'",
        ),
        (
            (1, 1),
            (2, 3),
            "the control plane '0.7.0+gc0' knows payload versions up to 1, and the data plane "
            "'0.6.0+gda' from 2 on: update the control plane '0.7.0+gc0'",
        ),
    ],
)
def test_releases_too_far_apart_do_not_register_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch, control: tuple[int, int], plane: tuple[int, int], text: str
) -> None:
    release(monkeypatch, *control)
    world = World(0)
    with pytest.raises(ProtocolMismatchError) as refused:
        Plane(world, **of(*plane)).register()
    assert refused.value.message == text
    assert not world.core.pool_ids(), "nothing is ready, and nothing is kept"


def test_shards_too_far_apart_are_not_of_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, 1, 3)
    world = World(0)
    old = Plane(world, shard=half(0), **of(1, 1, "old"))
    new = Plane(world, shard=half(1), **of(2, 3, "new"))
    old.join()
    with pytest.raises(ProtocolMismatchError, match="update the data plane 'old'"):
        new.register()
    old.leave()
    new.join()
    assert world.pool.shards.payload_version == 3
    assert not world.pool.ready, "the other half is missing"


class LaterSession(Session):
    """A session of a control plane whose release adds a field to plans, with version 3."""

    first_version = 3

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.payload_version >= self.first_version:
            self.plan_prefix += LATER_FIELD


class CarelessSession(LaterSession):
    """As LaterSession, but it writes the field to every data plane."""

    first_version = 2


def plan_for(
    monkeypatch: pytest.MonkeyPatch, session_class: type[Session], newest: int
) -> tuple[Engine, tpb.SignedPayload, Verifier]:
    """Return a plan of a later control plane, for a data plane that knows versions up to this, and
    that data plane.
    """
    release(monkeypatch, 1, 3)
    monkeypatch.setattr(sessions, "Session", session_class)
    shard = Plane(World(0), **of(1, newest))
    shard.join()
    engine = shard.world.engine()
    verifier = Verifier(POOL, 0, 1, epoch=shard.epoch)
    verifier.install(shard.world.incarnation, shard.pool_key)
    return engine, engine.step(ops.admit(1, range(9))).plan, verifier


def test_a_later_field_is_left_out_for_a_data_plane_that_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, signed, verifier = plan_for(monkeypatch, LaterSession, newest=2)
    plan, digest = verifier.plan(signed)
    assert plan.version == 2
    for version in (0, 3):
        receipt = verifier.receipt(plan.session, plan.number, digest, version=version)
        with refused(ProtocolMismatchError, "receipts[0].version"):
            engine.submit([receipt])
    engine.submit([verifier.receipt(plan.session, plan.number, digest, version=plan.version)])
    assert engine.session.done == plan.number
    _, later, _ = plan_for(monkeypatch, LaterSession, newest=3)
    assert LATER_FIELD in later.payload
    assert plan_pb2.Plan.FromString(later.payload).version == 3


def test_a_later_field_that_is_written_all_the_same_is_refused_by_the_side_to_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, signed, verifier = plan_for(monkeypatch, CarelessSession, newest=2)
    with pytest.raises(InvalidRequestError, match=r"number 15: .* update this data plane"):
        verifier.plan(signed)


@pytest.mark.parametrize("newest", [1, 2])
def test_plans_skip_files_while_a_forget_is_due_where_data_planes_know_the_field(
    newest: int,
) -> None:
    shard = Plane(World(0), has_file_tier=True, **of(1, newest))
    shard.join()
    world, engine, other = shard.world, shard.world.engine(), shard.world.engine("other")
    forget = rpb.ForgetFiles(tenant=engine.session.tenant)

    def skips(engine: Engine, i: int) -> bool:
        plan = plan_pb2.Plan.FromString(engine.step(ops.admit(i, range(9))).plan.payload)
        return plan.version == newest and plan.skips_files

    assert not skips(engine, 1)
    world.pool.shards.forget_files(forget)
    assert (skips(engine, 2), skips(other, 1)) == (newest == 2, False)
    world.pool.shards.withdrawn()
    assert skips(engine, 3) == (newest == 2)
    world.pool.shards.file_forgets.done(1, 0)
    assert not skips(engine, 4)
