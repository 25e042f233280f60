"""A new key signs once every shard holds it, and the former one is dropped by all before the next
rotation begins; whoever is away, silent or started anew, the pool goes on.
"""

from __future__ import annotations

import logging

import pytest
from planning_rig import PlanningRig
from registration_messages import half
from registration_world import Plane, World

from control_plane.planning.pools.keys import PoolKeys
from control_plane.planning.pools.rotation import KeyRotation, unconfirmed
from control_plane.planning.steps.receipts import take_receipts
from kvplane.errors import BadSignatureError, InvalidRequestError, StaleEpochError
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import signing

DAY_S = 86_400.0


class Keyed(Plane):
    """A data plane that takes keys, and confirms when it is told to."""

    def __init__(self, world: World, index: int = 0, num_shards: int = 1, epoch: int = 11) -> None:
        shard = {"shard": half(index, num_shards)} if num_shards > 1 else {}
        super().__init__(world, epoch=epoch, rotates_keys=True, **shard)
        self.keys: list[bytes] = []

    def join(self, part: pb.BlockReport | None = None) -> pb.Welcome:
        if not super().register().resumed:
            self.keys = [self.welcome.key]
            self.report(part)
        return self.welcome

    def read(self) -> list[str]:
        """Take what was sent; the kinds that are about keys."""
        kinds = []
        for message in self.take():
            kind = message.WhichOneof("message")
            if kind == "key_offer":
                self.keys = list(dict.fromkeys([*self.keys, message.key_offer.key]))
            elif kind == "key_retirement":
                ids = [*map(signing.key_id, self.keys)]
                self.keys = self.keys[ids.index(message.key_retirement.key_id) :]
            else:
                continue
            kinds.append(kind)
        ids = [*map(signing.key_id, self.keys), b""]
        self.hello.key_id, self.hello.newer_key_id = ids[:2]
        assert len(self.keys) <= 2
        return kinds

    def confirm(self) -> None:
        held = pb.KeysHeld(key_id=self.hello.key_id, newer_key_id=self.hello.newer_key_id)
        self.world.it.keys_held(*self.key, held)

    def follow(self) -> list[str]:
        kinds = self.read()
        self.confirm()
        return kinds


def joined(world: World, num_shards: int) -> list[Keyed]:
    planes = [Keyed(world, i, num_shards) for i in range(num_shards)]
    for plane in planes:
        plane.join()
    world.it.rotate(world.pool, 0.0)
    return planes


def test_it_signs_when_all_hold_it_and_the_former_is_dropped_by_all() -> None:
    world = World()
    a, b = joined(world, 2)
    keys = world.pool.keys
    first = keys.present
    world.it.rotate(world.pool, DAY_S - 1)
    assert not a.read() + b.read()
    world.it.rotate(world.pool, DAY_S)
    assert a.follow() == ["key_offer"]
    assert keys.present == first
    assert unconfirmed(world.pool) == [1]
    assert b.follow() == ["key_offer"]
    second = keys.present
    assert second != first
    assert a.read() == b.read() == ["key_retirement"]
    assert a.keys == b.keys == [second]
    a.confirm()
    world.it.rotate(world.pool, 9 * DAY_S)  # the next one waits for b
    assert not a.read()
    assert unconfirmed(world.pool) == [1]
    b.confirm()
    assert unconfirmed(world.pool) == []
    assert world.pool.statistics.num_key_rotations == 1
    world.it.rotate(world.pool, 9 * DAY_S)
    assert a.read() == b.read() == ["key_offer"]
    assert keys.present == second
    assert world.pool.ready


def test_an_operator_replaces_a_key_once() -> None:
    world = World()
    a, b = joined(world, 2)
    keys, first = world.pool.keys, world.pool.keys.number

    def replace(number: int = 0) -> tuple[int, bool, list[int]]:
        answer = world.it.replace_key(world.pool, number, 1.0)
        return answer.key_number - first, answer.done, [*answer.unconfirmed_shards]

    assert replace() == (0, False, [0, 1])
    assert replace() == replace(first) == (0, False, [0, 1])  # it has begun
    assert a.follow() == ["key_offer"]
    assert replace(first) == (0, False, [1])
    assert b.follow() == ["key_offer"]
    assert replace(first) == (0, False, [0, 1])  # another key signs, and this one still opens
    assert a.follow() == b.follow() == ["key_retirement"]
    assert replace(first) == replace(first) == (0, True, [])
    assert keys.number == first + 1
    assert not a.read() + b.read()

    assert replace() == (1, False, [0, 1])
    for plane in (a, b):
        plane.follow()
    assert replace() == (2, False, [0, 1])  # the newest, once the one before is dropped
    for _ in range(3):
        for plane in (a, b):
            plane.follow()
        world.it.rotate(world.pool, 2.0)
    assert replace(keys.number - 1) == (2, True, [])
    for number in (-1, keys.number + 1, 2**63 - 1):
        with pytest.raises(InvalidRequestError):
            replace(number)


def test_a_shard_that_comes_back_is_told_again() -> None:
    world = World()
    a, b = joined(world, 2)
    world.it.rotate(world.pool, DAY_S)
    a.follow()
    b.leave()  # what it was sent is lost
    assert b.join().resumed
    assert b.read() == ["key_offer"]
    b.leave()  # before it has confirmed; its Hello says what it holds
    a.leave()
    assert b.join().resumed
    assert b.read() == ["key_retirement"]  # all hold it
    b.confirm()
    assert a.join().resumed
    assert unconfirmed(world.pool) == [0]
    assert a.follow() == ["key_retirement"]
    assert a.keys == b.keys == [world.pool.keys.present]
    assert unconfirmed(world.pool) == []


def test_a_shard_that_is_started_anew_holds_the_present_key_and_is_offered_the_next() -> None:
    world = World()
    a, b = joined(world, 2)
    world.it.rotate(world.pool, DAY_S)
    a.follow()
    b.leave()
    again = Keyed(world, 1, 2, epoch=12)
    assert again.join().key == world.pool.keys.present
    assert not a.read()  # but that it is to report again
    a.report()
    assert a.keys[0] == world.pool.keys.present
    assert again.follow() == ["key_offer"]
    assert a.follow() == again.follow() == ["key_retirement"]
    assert world.pool.ready
    assert unconfirmed(world.pool) == []


def test_a_shard_that_starts_anew_need_not_drop_what_it_never_had() -> None:
    world = World()
    a, b = joined(world, 2)
    world.it.rotate(world.pool, DAY_S)
    a.follow()
    b.follow()
    a.follow()
    b.leave()
    again = Keyed(world, 1, 2, epoch=12)
    again.join()
    assert again.keys == [world.pool.keys.present]
    assert not again.read()
    assert unconfirmed(world.pool) == []


def test_a_lone_shard_that_starts_anew_begins_with_a_key_of_its_own() -> None:
    world = World()
    [a] = joined(world, 1)
    world.it.rotate(world.pool, DAY_S)
    offered = world.pool.keys.next
    a.leave()
    again = Keyed(world, epoch=12)
    again.join()
    assert again.keys[0] not in (a.keys[0], offered)
    assert not again.read()
    assert unconfirmed(world.pool) == []


def test_a_shard_of_an_earlier_release_stops_the_rotation_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    a, old = Keyed(world, 0, 2), Keyed(world, 1, 2)
    old.hello.rotates_keys = False
    a.join()
    old.join()
    world.it.rotate(world.pool, 0.0)
    world.pool.set_time(DAY_S)
    world.it.rotate(world.pool, DAY_S)
    assert not old.read()
    a.follow()
    with caplog.at_level(logging.WARNING):
        for seconds in range(60):
            world.it.rotate(world.pool, DAY_S + seconds)
    assert [record.getMessage() for record in caplog.records] == [
        "rotation of the key waits for shards [1] pool='pool'"
    ]
    assert unconfirmed(world.pool) == [1]
    assert world.pool.ready


def test_another_control_plane_begins_with_a_key_of_its_own() -> None:
    world = World()
    a, b = joined(world, 2)
    world.it.rotate(world.pool, DAY_S)
    a.follow()
    later = World(incarnation=8)
    for plane in (a, b):
        plane.world = later
        assert not plane.join().resumed
    assert a.keys == b.keys == [later.pool.keys.present]
    assert later.pool.ready
    assert unconfirmed(later.pool) == []


def test_a_key_that_lives_for_ever_is_never_replaced() -> None:
    world = World(key_lifetime_s=0.0)
    [a] = joined(world, 1)
    world.it.rotate(world.pool, 1e9)
    assert not a.read()


def test_what_is_said_of_keys_is_checked() -> None:
    world = World()
    [a] = joined(world, 1)
    for field in ("key_id", "newer_key_id"):
        with pytest.raises(InvalidRequestError) as error:
            world.it.keys_held(*a.key, pb.KeysHeld(**{field: b"short"}))
        assert error.value.field == f"keys_held.{field}"
    with pytest.raises(StaleEpochError):
        world.it.keys_held("pool", 0, 1, pb.KeysHeld())


def rotate(rig: PlanningRig) -> None:
    """A whole rotation of the rig's one shard."""
    rotation = KeyRotation(DAY_S, lambda _: rig.sessions.values())
    rig.pool.keys.since_s = 0.0
    rotation.tick(rig.pool, DAY_S)
    for ids in ((rig.pool.keys.present_id, rig.pool.keys.next_id), (rig.pool.keys.next_id, b"")):
        rotation.held(rig.pool, 0, pb.KeysHeld(key_id=ids[0], newer_key_id=ids[1]))
    rotation.tick(rig.pool, DAY_S)
    rig.pool.shards.states[0].outgoing.clear()


def test_receipts_are_taken_with_the_key_of_their_plan_or_a_later_one() -> None:
    rig = PlanningRig()
    first = rig.pool.keys.present
    rig.admit(1, range(8))
    of_first = rig.receipt(rig.session, 1)
    rotate(rig)
    second = rig.pool.keys.present
    assert second != first
    rig.admit(2, range(100, 108))
    rotate(rig)
    assert rig.pool.keys.num_former == 2  # the plans of both are in flight
    late = rig.receipt(rig.session, 2)
    late.signature = signing.sign(first, signing.RECEIPT, late.payload)
    with pytest.raises(BadSignatureError) as error:
        take_receipts(rig.session, [late])
    assert error.value.field == "receipts[0].signature"
    late.signature = signing.sign(second, signing.RECEIPT, late.payload)
    take_receipts(rig.session, [of_first, late])
    assert not rig.session.plans
    rotate(rig)
    assert rig.pool.keys.num_former == 0
    take_receipts(rig.session, [of_first, late])  # a request that is repeated
    late.payload = late.payload[:-1]
    with pytest.raises(BadSignatureError):
        take_receipts(rig.session, [late])
    rig.check()


def test_a_plan_that_is_never_receipted_delays_rotations_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = PlanningRig()
    rig.admit(1, range(8))
    for _ in range(16):
        rotate(rig)
    assert rig.pool.keys.num_former == 16
    present = rig.pool.keys.present
    rotate(rig)
    assert rig.pool.keys.present == present
    assert "waits for receipts of plans" in caplog.text
    rig.run()
    rotate(rig)
    assert rig.pool.keys.present != present
    assert rig.pool.keys.num_former == 0


def verify(keys: PoolKeys, signed: tpb.SignedPayload) -> int:
    return keys.verify_receipt(signed.type, signed.payload, signed.signature, "receipts[0]")


def test_a_receipt_may_be_signed_with_the_key_that_is_offered() -> None:
    keys = PoolKeys()
    keys.make_next()
    receipt = tpb.SignedPayload(type=signing.RECEIPT, payload=b"1")
    for key, number in ((keys.present, 1), (keys.next, 2)):
        receipt.signature = signing.sign(key, signing.RECEIPT, receipt.payload)
        assert verify(keys, receipt) == number
    receipt.type = signing.PLAN
    with pytest.raises(BadSignatureError):
        verify(keys, receipt)
