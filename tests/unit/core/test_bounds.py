"""What callers can make the core keep has a bound, beyond which they are refused by name."""

from __future__ import annotations

import pytest

from control_plane import limits
from control_plane.watching import Watcher
from kvplane.errors import PoolNotReadyError, QuotaExceededError
from kvplane.prefixes import ForgetScope
from kvplane.wire.v1 import prefix_pb2 as ppb
from tests.helpers.core.core_messages import POOL
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import hello
from tests.helpers.refusals import refused


def test_pools_are_bounded_until_one_without_data_planes_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_POOLS", 2)
    monkeypatch.setattr(limits, "POOL_EXPIRY_S", 100.0)
    world = World()
    other = hello(pool_id="other")
    world.core.register(other)
    with refused(QuotaExceededError, "hello.pool_id"):
        world.core.register(hello(pool_id="third"))
    world.core.disconnect("other", 0, other.epoch)
    for _ in range(2):
        world.after(60)
    assert world.core.pool_ids() == ["other", POOL], "it was seen without them 60 s ago"
    world.after(60)
    assert world.core.pool_ids() == [POOL], "a pool with a data plane is kept"
    world.core.register(hello(pool_id="third"))


def test_a_pool_whose_data_plane_came_back_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "POOL_EXPIRY_S", 100.0)
    world = World()
    for _ in range(3):
        world.shards[0].leave()
        world.core.tick()
        world.clock.now += 90
        world.shards[0].come()
        world.core.tick()
        world.clock.now += 90
    assert world.core.pool_ids() == [POOL]


def test_namespaces_of_a_tenant_are_bounded_while_they_hold_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_TENANT_NAMESPACES", 2)
    world = World()
    first, second = world.engine(namespace="a"), world.engine(namespace="b")
    with refused(QuotaExceededError, "namespace"):
        world.engine(namespace="c")
    world.engine(namespace="a")
    world.engine(tenant="other", namespace="c")
    second.admit(1, range(16))
    second.settle()
    second.close()
    world.pump()
    with pytest.raises(QuotaExceededError):
        world.engine(namespace="c")
    forgetting = world.engine(namespace="b")
    forgetting.forget(ForgetScope.NAMESPACE)
    forgetting.close()
    world.pump()
    world.engine(namespace="c")
    first.renew()


def test_no_session_is_opened_while_too_many_have_not_been_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_UNFENCED_SESSIONS", 3)
    world = World()
    for _ in range(3):
        world.engine().close()
    with pytest.raises(PoolNotReadyError) as refused:
        world.engine()
    assert refused.value.retry_delay_s is not None
    world.pump()
    world.engine()


def test_followers_are_bounded_and_one_account_has_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_WATCHERS", 4)
    world = World()

    def follow(payer: str) -> Watcher:
        request = ppb.WatchPrefixesRequest(pool_id=POOL)
        return world.core.watch(request, "tenant", lambda: None, payer)

    first, *_ = [follow("a") for _ in range(3)]
    with pytest.raises(QuotaExceededError):
        follow("a")
    follow("b")
    with pytest.raises(QuotaExceededError):
        follow("b")
    world.core.unwatch(first)
    follow("a")


def test_blocks_are_bounded_over_all_pools() -> None:
    world = World(max_blocks=28)  # of which the world's own data plane has 24
    other = hello(pool_id="other", num_host_blocks=0)
    other.num_device_blocks = 5
    with refused(QuotaExceededError, "hello.num_device_blocks"):
        world.core.register(other)
    assert world.core.pool_ids() == [POOL]
    other.num_device_blocks = 4
    world.core.register(other)
    other.epoch += 1
    world.core.register(other)  # its own blocks do not count twice
