"""Retaining and forgetting without a session: what the core does between requests of sessions."""

from __future__ import annotations

import pytest

from control_plane.config import CoreConfig
from kvplane import ops
from kvplane.errors import PoolNotReadyError, QuotaExceededError
from kvplane.prefixes import ForgetScope
from kvplane.wire.error_messages import duration_of
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.core.core_messages import POOL
from tests.helpers.core.core_model import Engine, World


def write(engine: Engine, tokens: range) -> None:
    engine.admit(1, tokens)
    engine.settle()
    engine.send(ops.free([1]))
    engine.settle()


def retain(world: World, tenant: str, namespace: str, *, time_to_live_s: int = 60) -> int:
    """Retain the prompt of 17 tokens; 0 s end its retention."""
    request = pb.RetainPrefixRequest(
        pool_id=POOL,
        namespace=namespace,
        token_ids=ops.pack_tokens(range(17)),
        time_to_live=duration_of(time_to_live_s or None),
        priority=50,
    )
    return world.core.retain_prefix(request, tenant).num_blocks


def test_a_tenant_has_one_quota_over_its_namespaces_and_others_have_their_own() -> None:
    world = World(num_device=16, config=CoreConfig(watermark=0.0, max_retained_share=0.125))
    owners = [("tenant", ""), ("tenant", "lora"), ("other", "")]
    for owner in owners:
        write(world.engine(*owner), range(17))
    assert retain(world, *owners[0]) == 2
    with pytest.raises(QuotaExceededError) as refused:
        retain(world, *owners[1])
    assert refused.value.field == "token_ids"
    assert retain(world, *owners[2]) == 2
    assert retain(world, *owners[0], time_to_live_s=0) == 2, "it ends"
    assert retain(world, *owners[1]) == 2


def test_a_search_of_many_pools_runs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.prefixes._SLICE_BLOCKS", 1)
    world = World()
    engine = world.engine()
    write(engine, range(17))
    for pool_id in ("a", "z"):
        other = world.shards[0].hello()
        other.pool_id = pool_id
        world.core.register(other)
    request = pb.FindPrefixRequest(token_ids=ops.pack_tokens(range(17)))
    slices = world.core.find_prefix(request, "tenant")
    next(slices)  # the first pool was searched
    engine.forget(ForgetScope.NAMESPACE)
    next(slices)
    with pytest.raises(StopIteration) as end:
        next(slices)
    found = {each.pool_id: each.num_device_tokens for each in end.value.value.matches}
    assert found == {"a": 0, POOL: 0, "z": 0}


@pytest.mark.parametrize("scope", ForgetScope)
def test_nothing_is_forgotten_before_all_shards_have_reported(scope: ForgetScope) -> None:
    world = World()
    engine = world.engine()
    write(engine, range(17))
    world.pump()
    world.shards[0].restart()
    world.core.register(world.shards[0].hello())
    with pytest.raises(PoolNotReadyError) as refused:
        engine.forget(scope)
    assert refused.value.retry_delay_s
    with pytest.raises(PoolNotReadyError):
        retain(world, "tenant", "")
    world.shards[0].join()
    assert retain(world, "tenant", "") == 0
