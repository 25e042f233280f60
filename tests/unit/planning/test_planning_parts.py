"""Parts of planning by themselves: queries, the queue's view of the blocks, retention, grants."""

from __future__ import annotations

import pytest

from control_plane import prefixes, queries
from control_plane.sessions.device_blocks import DeviceBlocks
from control_plane.sessions.news import PoolNews
from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.session import QueuedAdmission
from control_plane.sessions.sessions import Sessions
from control_plane.steps.plans import sign_grant
from kvplane import ops
from kvplane.slices import run_to_end
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.planning.planning_rig import BLOCK_SIZE, DEVICE, PlanningRig

PROMPT = range(2 * BLOCK_SIZE + 3)


@pytest.fixture
def rig() -> PlanningRig:
    """Sequence 1 is written: two published blocks and three more tokens."""
    rig = PlanningRig()
    rig.admit(1, PROMPT)
    rig.run()
    return rig


def test_queries_take_nothing(rig: PlanningRig) -> None:
    before = rig.pool.usage()
    request = ppb.FindPrefixRequest(token_ids=ops.pack_tokens(PROMPT), with_blocks=True)
    (found,) = run_to_end(prefixes.find([rig.pool], request, rig.session.tenant)).matches
    assert (found.num_device_tokens, found.num_host_tokens) == (2 * BLOCK_SIZE, 0)
    assert len(found.blocks.tiers) == 2
    assert columns.read(INT64, queries.states(rig.session).sequence_ids, "ids").tolist() == [1]
    assert rig.pool.usage() == before


def test_the_queue_sees_what_sequences_hold(rig: PlanningRig) -> None:
    blocks = DeviceBlocks(rig.pool, rig.sessions)
    key = rig.session.native.family_of(rig.session.handle, 1)
    rig.step(ops.fork(1, 2))
    assert blocks.num_blocks == rig.pool.num_blocks(DEVICE)
    assert blocks.num_held(1, key) >= 3, "it may be too high, but never too low"
    assert blocks.num_obtainable(1) == blocks.num_blocks - 3
    assert blocks.num_pending(1) == 0
    assert blocks.retired_since(1) is None


def test_a_session_that_ends_leaves_those_that_share(rig: PlanningRig) -> None:
    assert isinstance(rig.all, Sessions)
    assert isinstance(rig.admission, PoolAdmission)
    rig.open(2)
    rig.end(2)
    assert list(rig.admission.sessions) == list(rig.sessions) == [1]


def test_news_are_told_once_and_stay_for_the_answer(rig: PlanningRig) -> None:
    news = PoolNews()
    news.cut(rig.session, 1, cpb.CUT_REASON_TURN)
    ((session_id, told),) = news.take_notices()
    assert (session_id, news.take_notices()) == (1, [])
    assert news.take(rig.session) == told
    news.asked(rig.session, columns.pack(INT64, [1]), 3, 0.5)
    assert news.take(rig.session) is not None
    assert (news.take_notices(), rig.session.news) == ([], None)


def test_an_admission_that_waits_has_the_ids_of_its_forks() -> None:
    forks = columns.pack(INT64, [5, 6])
    waiting = QueuedAdmission(1, cpb.Admit(sequence_id=4, fork_sequence_ids=forks), 3, 0.0)
    assert [waiting.names(i) for i in (4, 5, 6, 7)] == [True, True, True, False]
    assert [waiting.is_of(i) for i in (4, 5)] == [True, False]
    assert not QueuedAdmission(2, None, 3, 0.0).names(4), "a swap-in has none"


def test_a_grant_is_signed_with_the_pools_key(rig: PlanningRig) -> None:
    signed = sign_grant(rig.session, max_plans_in_flight=3)
    signing.verify(
        rig.pool.key,
        signing.GRANT,
        signed.type,
        signed.payload,
        signed.signature,
        field="grant",
    )
    grant = plan_pb2.SessionGrant.FromString(signed.payload)
    assert (grant.session, grant.max_plans_in_flight) == (rig.session.ref, 3)
