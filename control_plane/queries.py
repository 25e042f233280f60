"""Read-only queries about sequences, and the check of a pool's invariants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from control_plane.pages import page_of
from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session
from kvplane.errors import SequenceNotFoundError
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.error_messages import duration_of
from kvplane.wire.v1 import pool_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb


def states(session: Session, sequence_ids: bytes | None = None) -> cpb.SequenceStates:
    """Describe these sequences, all live, or all of the session for None."""
    (
        ids,
        admitted_by,
        num_tokens,
        num_scheduled,
        num_written,
        num_cached,
        num_blocks,
        tiers,
    ) = session.native.states(session.handle, sequence_ids)
    return cpb.SequenceStates(
        sequence_ids=ids,
        admitted_by=admitted_by,
        num_tokens=num_tokens,
        num_scheduled_tokens=num_scheduled,
        num_written_tokens=num_written,
        num_cached_tokens=num_cached,
        num_blocks=num_blocks,
        tiers=tiers,
    )


def block_table(session: Session, request: cpb.GetBlockTableRequest) -> cpb.GetBlockTableResponse:
    """Return a sequence's blocks. Raises SequenceNotFoundError."""
    _require_live(session, request.sequence_id, "sequence_id")
    response = cpb.GetBlockTableResponse()
    for group, core in enumerate(session.pool.groups):
        tier, indices, generations, response.num_tokens, _ = core.table(
            session.handle, request.sequence_id
        )
        response.tables.add(
            group=group, tier=cast(tpb.Tier, tier), indices=indices, generations=generations
        )
    return response


def describe_sequence(
    session: Session, request: cpb.DescribeSequenceRequest
) -> cpb.DescribeSequenceResponse:
    """Describe a sequence's positions and blocks. Raises SequenceNotFoundError."""
    _require_live(session, request.sequence_id, "sequence_id")
    ids = columns.pack(INT64, [request.sequence_id])
    return cpb.DescribeSequenceResponse(sequences=states(session, ids))


def list_pools(pool_ids: Sequence[str], request: ppb.ListPoolsRequest) -> ppb.ListPoolsResponse:
    """Return the page of ``pool_ids``, which ascend. Raises InvalidRequestError."""
    shown, next_page_token = page_of(pool_ids, request, of="pools", parse=str)
    return ppb.ListPoolsResponse(pool_ids=shown, next_page_token=next_page_token)


def list_sessions(
    sessions: Iterable[Session], request: ppb.ListSessionsRequest, now_s: float
) -> ppb.ListSessionsResponse:
    """List a page of sessions, or the one that the request names with its sequences. ``now_s``:
    monotonic seconds. Raises InvalidRequestError.
    """
    wanted = {each.id: each for each in sessions if request.session_id in (0, each.id)}
    shown, next_page_token = page_of(
        sorted(wanted), request, of=f"sessions of {request.pool_id}", parse=int
    )
    response = ppb.ListSessionsResponse(next_page_token=next_page_token)
    for session in map(wanted.__getitem__, shown):
        response.sessions.add(
            session=session.ref,
            client_name=session.client_name,
            namespace=session.namespace,
            num_sequences=session.native.num_sequences(session.handle),
            num_held_blocks=session.num_held(),
            num_plans_in_flight=len(session.plans),
            last_number=session.numbers.last,
            time_to_live=duration_of(max(0.0, session.expires_at_s - now_s)),
            sequences=states(session) if request.session_id else None,
        )
    return response


def _require_live(session: Session, sequence_id: int, field: str) -> None:
    if not session.native.has_sequence(session.handle, sequence_id):
        raise SequenceNotFoundError(f"sequence {sequence_id} is not live", field=field)


def check_pool(pool: Pool, sessions: Iterable[Session]) -> None:
    """Raise AssertionError naming the first invariant of the core that does not hold. ``sessions``:
    all open ones. The native core counts its blocks again from tables, plans and sessions. Slow, as
    it scans the pool: for tests.
    """
    for core in pool.groups:
        core.check_integrity()
    sessions = list(sessions)
    handles = {session.handle for session in sessions}
    assert len(handles) == len(sessions), "two sessions have one handle"
    for session in sessions:
        _check_session(pool, session)
    for usage in pool.usage():
        parts = (
            usage.num_free_blocks,
            usage.num_cached_blocks,
            usage.num_held_blocks,
            usage.num_retired_blocks,
        )
        assert min(parts) >= 0, f"tier {usage.tier}: a negative count"
        assert sum(parts) == usage.num_blocks, f"tier {usage.tier}: blocks are not conserved"


def _check_session(pool: Pool, session: Session) -> None:
    native, handle = session.native, session.handle
    assert native is pool.native, f"session {session.id}: of an earlier build of the pool"
    assert native.plans_in_flight(handle) == len(session.plans), "plans in flight differ"
    assert native.last_plan(handle) == session.last_plan, "last plans differ"
    assert all(number > session.done for number in session.plans), "a plan that ran is in flight"
    assert session.done == min(session.receipted), f"session {session.id}: receipts differ"
