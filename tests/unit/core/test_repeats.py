"""A late copy of a request that opens, retains or forgets changes nothing if their keys agree."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane import limits
from kvplane import ops
from kvplane.errors import BlockInUseError, InvalidRequestError
from kvplane.wire.error_messages import duration_of
from kvplane.wire.v1 import prefix_pb2 as pb
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import POOL
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import LAYOUT
from tests.helpers.refusals import refused

OPEN = cpb.OpenSessionRequest(pool_id=POOL, layout=LAYOUT.to_proto())
RETAIN = pb.RetainPrefixRequest(
    pool_id=POOL, token_ids=ops.pack_tokens(range(17)), time_to_live=duration_of(60), priority=50
)
FORGET = pb.ForgetPrefixesRequest(pool_id=POOL, scope=pb.FORGET_SCOPE_NAMESPACE)


def num_sessions(world: World) -> int:
    return len(world.core.sessions.by_id)


def test_a_late_copy_opens_no_session() -> None:
    world = World()
    first = world.core.open_session(OPEN, "ann", "key")
    assert world.core.open_session(OPEN, "ann", "key") == first
    assert num_sessions(world) == 1
    world.core.close_session(first.session, "ann")
    assert world.core.open_session(OPEN, "ann", "key") == first, "it has ended, and stays so"
    assert num_sessions(world) == 0
    world.core.check_integrity()


def test_a_late_copy_retains_nothing() -> None:
    world = World()
    world.engine("ann").cache(range(17))
    ends = pb.RetainPrefixRequest(pool_id=POOL, token_ids=RETAIN.token_ids)
    first = world.core.retain_prefix(RETAIN, "ann", "key")
    assert world.core.retain_prefix(ends, "ann").num_blocks == first.num_blocks
    assert world.core.retain_prefix(RETAIN, "ann", "key") == first
    assert world.core.retain_prefix(ends, "ann").num_blocks == 0
    world.core.check_integrity()


def test_a_late_copy_forgets_nothing_that_was_cached_since() -> None:
    world = World()
    engine = world.engine("ann")
    engine.cache(range(17))
    first = world.core.forget_prefixes(FORGET, "ann", "key")
    assert first.num_forgotten_blocks
    engine.cache(range(17))
    assert world.core.forget_prefixes(FORGET, "ann", "key") == first
    assert engine.cached(99, range(17)) == 16
    world.core.check_integrity()


def test_a_refused_request_may_be_sent_again_with_its_key() -> None:
    world = World()
    engine = world.engine("ann")
    engine.cache(range(17))
    assert engine.cached(99, range(17)) == 16
    with pytest.raises(BlockInUseError):
        world.core.forget_prefixes(FORGET, "ann", "key")
    engine.step(ops.free([99]))
    assert world.core.forget_prefixes(FORGET, "ann", "key").num_forgotten_blocks


def test_a_key_is_one_tenants_and_of_one_request() -> None:
    world = World()
    world.engine("ann").cache(range(17))
    world.core.open_session(OPEN, "ann", "key")
    assert num_sessions(world) == 2
    world.core.open_session(OPEN, "bob", "key")
    assert num_sessions(world) == 3
    other = cpb.OpenSessionRequest(pool_id=POOL, layout=OPEN.layout, client_name="another")
    with refused(InvalidRequestError, "idempotency-key"):
        world.core.open_session(other, "ann", "key")
    with refused(InvalidRequestError, "idempotency-key"):
        world.core.retain_prefix(RETAIN, "ann", "key")


@pytest.mark.parametrize("key", ["x" * 65, "a b", "ä", "\n"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with refused(InvalidRequestError, "idempotency-key"):
        World().core.open_session(OPEN, "ann", key)


@pytest.mark.parametrize(
    ("limit", "most"), [("MAX_IDEMPOTENCY_KEYS", 2), ("MAX_IDEMPOTENT_ANSWER_BYTES", 600)]
)
def test_as_many_are_remembered_as_fit(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    monkeypatch.setattr(limits, limit, most)
    opened: list[Any] = [world.core.open_session(OPEN, "ann", f"{i}") for i in range(3)]
    num_bytes = opened[0].ByteSize()
    assert 200 < num_bytes <= 300, "two answers fit, and three do not"
    assert world.core.open_session(OPEN, "ann", "2") == opened[2]
    assert world.core.open_session(OPEN, "ann", "1") == opened[1]
    assert world.core.open_session(OPEN, "ann", "0") != opened[0]
