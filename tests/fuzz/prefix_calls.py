"""Calls that concern cached prefixes: retention and forgetting."""

from __future__ import annotations

from tests.fuzz.pool_world import OWNERS, Call, Session, World


def retain(world: World, _: Session) -> None:
    data = world.data
    expires_at_s = world.now_s + data.PickValueInList([1.0, 9.0, 9.0, 1e15, 0.0, -1.0])
    priority = data.ConsumeIntInRange(-1, 102) if data.ConsumeBool() else 1
    most_blocks = world.number(12) if data.ConsumeBool() else 100
    root = world.root()
    world.pool.retain(root, OWNERS[root], _prefix(world), priority, expires_at_s, most_blocks)


def release(world: World, _: Session) -> None:
    root = world.root()
    world.pool.release_retained(root, OWNERS[root], _prefix(world))


def forget(world: World, _: Session) -> None:
    tokens, force = _prefix(world), world.data.ConsumeBool()
    found, in_use = world.pool.forget(world.root(), tokens, force, world.number(4))
    assert 0 <= in_use <= found or (not force and found == 0)


def forget_roots(world: World, _: Session) -> None:
    roots = [world.root() for _ in range(world.data.ConsumeIntInRange(0, 3))]
    world.pool.forget_roots(roots, world.data.ConsumeBool())


def forget_some(world: World, _: Session) -> None:
    core = world.core()
    core.forget_some(world.number(4))
    core.take_withdrawn(world.unsigned(3, 64))


def tick(world: World, _: Session) -> None:
    """Time goes on, in all groups; nothing else is a time."""
    world.now_s += world.data.PickValueInList([0.5, 2.0, 40.0])
    for core in world.cores:
        core.set_time(world.now_s)
    world.core().set_time(world.data.PickValueInList([-1.0, float("nan"), float("inf"), 1e12]))


def count(world: World, _: Session) -> None:
    core, owner = world.core(), world.unsigned(4, 32)
    assert core.num_retained(owner) >= 0
    assert core.num_owned(owner) >= 0
    assert core.oldest_release_s() >= 0


def _prefix(world: World) -> bytes:
    """Whole blocks, as the control plane has them of what is forgotten; now and then any bytes."""
    return world.ids(1) if world.data.ConsumeIntInRange(0, 15) == 15 else world.prefix()


PREFIX_CALLS: tuple[Call, ...] = (
    retain, release, forget, forget_roots, forget_some, tick, count,
)  # fmt: skip
