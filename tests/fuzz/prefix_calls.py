"""Calls that concern cached prefixes: retention, forgetting, and floors of owners."""

from __future__ import annotations

from pool_world import DEVICE, OWNERS, Call, Session, World

TENTHS = 10


def retain(world: World, session: Session) -> None:
    data = world.data
    expires_at_s = world.now_s + data.PickValueInList([1.0, 9.0, 9.0, 1e15, 0.0, -1.0])
    priority = data.ConsumeIntInRange(-1, 102) if data.ConsumeBool() else 1
    most_blocks = world.number(12) if data.ConsumeBool() else 100
    world.pool.retain(session.slot, _prefix(world), priority, expires_at_s, most_blocks)


def release(world: World, session: Session) -> None:
    world.pool.release_retained(session.slot, _prefix(world))


def forget(world: World, session: Session) -> None:
    tokens, force = _prefix(world), world.data.ConsumeBool()
    found, in_use = world.pool.forget(session.slot, tokens, force, world.number(4))
    assert 0 <= in_use <= found or (not force and found == 0)


def forget_roots(world: World, _: Session) -> None:
    roots = [world.root() for _ in range(world.data.ConsumeIntInRange(0, 3))]
    world.pool.forget_roots(roots, world.data.ConsumeBool())


def forget_some(world: World, _: Session) -> None:
    core = world.core()
    core.forget_some(world.number(4))
    core.take_forgotten(world.unsigned(3, 64))


def tick(world: World, _: Session) -> None:
    """Time goes on, in all groups; nothing else is a time."""
    world.now_s += world.data.PickValueInList([0.5, 2.0, 40.0])
    for core in world.cores:
        core.set_time(world.now_s)
    world.core().set_time(world.data.PickValueInList([-1.0, float("nan"), float("inf"), 1e12]))


def set_floor(world: World, _: Session) -> None:
    """A share of the device blocks in each group, where all have shares that fit; or what is not a
    floor.
    """
    owner = world.data.PickValueInList([*world.floors])
    num_left = TENTHS - sum(world.floors.values()) + world.floors[owner]
    world.floors[owner] = share = world.data.ConsumeIntInRange(0, num_left)
    for core in world.cores:
        core.set_floor(owner, core.usage(DEVICE)[0] * share // TENTHS)
    core = world.core()
    core.set_floor(world.data.PickValueInList([1, 2**20]), core.usage(DEVICE)[0] + 1)


def own_root(world: World, _: Session) -> None:
    root = world.root()
    for core in world.cores:
        core.own_root(root, OWNERS[root])
        core.own_root(b"no such root", 1)
    world.core().own_root(root, 2**20)


def count(world: World, _: Session) -> None:
    core, owner, root = world.core(), world.unsigned(4, 32), world.root()
    assert core.num_retained(owner) >= 0
    assert 0 <= core.num_reserved(owner) <= core.usage(DEVICE)[0]
    assert core.num_published(root) >= 0
    assert core.num_owned(owner) >= 0
    assert core.oldest_release_s() >= 0


def _prefix(world: World) -> bytes:
    """Whole blocks, as the control plane has them of what is forgotten; now and then any bytes."""
    return world.ids(1) if world.data.ConsumeIntInRange(0, 15) == 15 else world.prefix()


PREFIX_CALLS: tuple[Call, ...] = (
    retain, release, forget, forget_roots, forget_some, tick, set_floor, own_root, count,
)  # fmt: skip
