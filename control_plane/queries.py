"""Read-only queries about sequences, their pages, and the check of a pool's invariants.

A page begins after the last id of the page before, so what comes or goes between two pages moves
nothing else from one to another.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any, Final, Protocol, TypeVar, cast

from control_plane.pools.pool import Pool
from control_plane.pools.reports import TIERS
from control_plane.sessions.session import Session
from kvplane.errors import InvalidRequestError, SequenceNotFoundError
from kvplane.results import SequenceState
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.error_messages import duration_of
from kvplane.wire.v1 import pool_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

MAX_PAGE_SIZE: Final = 1000

Id = TypeVar("Id", int, str)
STATES: Final = ("free", "cached", "retired", "pinned", "held")
"""Names of the states of blocks; a cell of the page's map holds an index into them."""
TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}

# A view counts what exceeds these bounds.
_MAX_CELLS: Final = 4096
_MAX_SESSIONS: Final = 50
_MAX_SEQUENCES: Final = 100


def states(session: Session, sequence_ids: bytes | None = None) -> cpb.SequenceStates:
    """Return the states of these sequences, all live, or of all of the session's for None."""
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
        num_awaited_blocks=_awaited(session, ids),
        checkpoint_positions=session.native.checkpoints(session.handle, ids),
    )


def _awaited(session: Session, ids: bytes) -> bytes:
    """Return the column of how many blocks each sequence waits for; empty if none waits."""
    if not session.wanted:
        return b""
    awaited = dict(session.wanted.values())
    return columns.pack(
        INT32, [awaited.get(each, 0) for each in columns.read(INT64, ids, "sequence_ids")]
    )


def list_sequences(
    session: Session, request: cpb.ListSequencesRequest
) -> cpb.ListSequencesResponse:
    """List a page of a session's sequences, or of those that the request names. Raises
    InvalidRequestError, SequenceNotFoundError.
    """
    named = columns.read(INT64, request.sequence_ids, "sequence_ids")
    if len(named) > MAX_PAGE_SIZE:
        raise InvalidRequestError(f"must be at most {MAX_PAGE_SIZE}", field="sequence_ids")
    for i, sequence_id in enumerate(named):
        if not session.native.has_sequence(session.handle, sequence_id):
            raise SequenceNotFoundError(
                f"sequence {sequence_id} is not live", field=f"sequence_ids[{i}]"
            )
    if len(set(named)) < len(named):
        raise InvalidRequestError("must be distinct", field="sequence_ids")
    if request.with_tables and len(named) != 1:
        raise InvalidRequestError("must be one sequence with with_tables", field="sequence_ids")
    ids = (
        sorted(named)
        if named
        else columns.read(INT64, session.native.sequence_ids(session.handle), "ids")
    )
    shown, next_page_token = page_of(ids, request, of=f"sequences of {session.id}", parse=int)
    response = cpb.ListSequencesResponse(
        sequences=states(session, columns.pack(INT64, shown)), next_page_token=next_page_token
    )
    if request.with_tables:
        for group, core in enumerate(session.pool.groups):
            tier, indices, generations = core.table(session.handle, named[0])[:3]
            response.tables.add(
                group=group, tier=cast(tpb.Tier, tier), indices=indices, generations=generations
            )
    return response


def list_pools(pool_ids: Sequence[str], request: ppb.ListPoolsRequest) -> ppb.ListPoolsResponse:
    """Describe a page of the pools in ``pool_ids``, which ascend. Raises InvalidRequestError."""
    shown, next_page_token = page_of(pool_ids, request, of="pools", parse=str)
    return ppb.ListPoolsResponse(pool_ids=shown, next_page_token=next_page_token)


def list_sessions(
    sessions: Iterable[Session], request: ppb.ListSessionsRequest, now_s: float
) -> ppb.ListSessionsResponse:
    """Describe a page of sessions. ``now_s``: monotonic seconds. Raises InvalidRequestError."""
    listed = {each.id: each for each in sessions}
    shown, next_page_token = page_of(
        sorted(listed), request, of=f"sessions of {request.pool_id}", parse=int
    )
    response = ppb.ListSessionsResponse(next_page_token=next_page_token)
    for session in map(listed.__getitem__, shown):
        response.sessions.add(
            session=session.ref,
            client_name=session.client_name,
            namespace=session.namespace,
            num_sequences=session.native.num_sequences(session.handle),
            num_held_blocks=session.num_held(),
            num_plans_in_flight=len(session.plans),
            last_number=session.numbers.last,
            time_to_live=duration_of(max(0.0, session.expires_at_s - now_s)),
        )
    return response


def check_pool(pool: Pool, sessions: Iterable[Session]) -> None:
    """Check the invariants of one pool. Raises AssertionError naming the first that does not hold.
    ``sessions``: all open ones. The native core counts its blocks again from tables, plans and
    sessions. Slow, as it scans the pool: for tests.
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
    receipts = {payload for record in session.plans.values() for payload in record.receipts}
    assert session.expected.keys() == receipts, "receipts of plans not in flight are expected"


class PageRequest(Protocol):
    """A request for one page of a list: its ``page_size`` and ``page_token``."""

    page_size: int
    page_token: str


def page_of(
    ids: Sequence[Id], request: PageRequest, *, of: str, parse: Callable[[str], Id]
) -> tuple[Sequence[Id], str]:
    """Return one page of ``ids``, which ascend, and the token of the next page, empty if there is
    none. ``of`` names the list: the token of another list is refused. ``parse`` reads an id, and
    raises ValueError. Raises InvalidRequestError for page_size and page_token.
    """
    if not 0 <= request.page_size <= MAX_PAGE_SIZE:
        raise InvalidRequestError(f"must be from 0 to {MAX_PAGE_SIZE}", field="page_size")
    begin, prefix = 0, f"{of}/"
    if request.page_token:
        try:
            token = b64decode(request.page_token, b"-_", validate=True).decode()
            if not token.startswith(prefix):
                raise ValueError(of)
            begin = bisect_right(ids, parse(token.removeprefix(prefix)))
        except ValueError as error:
            raise InvalidRequestError(
                "must be the next_page_token of an answer for the same list", field="page_token"
            ) from error
    end = begin + (request.page_size or MAX_PAGE_SIZE)
    if end >= len(ids):
        return ids[begin:], ""
    return ids[begin:end], urlsafe_b64encode(f"{prefix}{ids[end - 1]}".encode()).decode()


def view(pool: Pool, sessions: Collection[Session], tenant: str) -> dict[str, Any]:
    """Return the pool as the page shows it to one tenant, as JSON values: all blocks by state, and
    those of its open ``sessions`` that are the tenant's, with their sequences.
    """
    own = [session for session in sessions if session.tenant == tenant]
    counters = pool.counters()
    return {
        "id": pool.id,
        "ready": pool.ready,
        "model": pool.layout.model_id,
        "block_size_tokens": pool.block_size,
        "num_sessions": len(sessions),
        "num_sequences": sum(pool.primary.num_sequences_in(tier) for tier in TIERS),
        "num_lookup_tokens": counters.num_lookup_tokens,
        "num_hit_tokens": counters.num_hit_tokens,
        "num_evictions": counters.num_evictions,
        "maps": [_map(pool, group, tier) for group in range(len(pool.groups)) for tier in TIERS],
        "sessions": _sessions(sorted(own, key=lambda session: session.id)),
    }


def _map(pool: Pool, group: int, tier: tpb.Tier) -> dict[str, Any]:
    """Return a digit for each cell of the page's map of blocks: an index into ``STATES``."""
    core = pool.groups[group]
    blocks_per_cell, cells = core.block_map(tier, _MAX_CELLS)
    num_blocks, num_free, num_cached, num_held, num_retired = core.usage(tier)
    return {
        "group": pool.layout.groups[group].name,
        "tier": TIER_NAMES[tier],
        "num_blocks": num_blocks,
        "num_in": {
            "free": num_free,
            "cached": num_cached,
            "retired": num_retired,
            "held": num_held,
        },
        "blocks_per_cell": blocks_per_cell,
        "cells": "".join(map(str, cells)),
    }


def _sessions(sessions: list[Session]) -> list[dict[str, Any]]:
    room = _MAX_SEQUENCES
    shown = []
    for session in sessions[:_MAX_SESSIONS]:
        sequences = list(islice(SequenceState.all_from_proto(states(session)), room))
        room -= len(sequences)
        shown.append(
            {
                "id": str(session.id),  # JSON's numbers are exact to 2^53
                "num_sequences": session.native.num_sequences(session.handle),
                "num_held_blocks": session.num_held(),
                "sequences": [
                    {
                        "id": str(each.sequence_id),
                        "num_tokens": each.num_tokens,
                        "num_cached_tokens": each.num_cached_tokens,
                        "num_blocks": each.num_blocks,
                        "tier": TIER_NAMES[cast(tpb.Tier, each.tier)],
                    }
                    for each in sequences
                ],
            }
        )
    return shown
