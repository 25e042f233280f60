"""Watchers of a pool's prefix index: a snapshot of one root's blocks, then each change to them.

A watcher has no queue. It keeps its position in the core's log of changes and takes the next ones
when it has sent those before, so a slow one costs nothing. When the log does not reach back to its
position any more, it has to start again.

    cleared ──► snapshot ──► changes made meanwhile ──► end of the snapshot ──► changes ...
       ▲                                                                           │
       └───────────────────── a data plane has restarted ◄─────────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Final

from control_plane.pools.pool import Pool
from control_plane.pools.publications import HASH_BYTES, root_of
from control_plane.prefixes import check_namespace
from kvplane.errors import InvalidRequestError, QuotaExceededError, RevisionTooOldError
from kvplane.wire.v1 import prefix_pb2 as pb

# Blocks or changes of one message.
_MAX_ELEMENTS: Final = 1024
# Changes of others after which a watcher gets the revision, to resume from it.
_MAX_UNNOTIFIED: Final = 4096
_END: Final = -1
_STORED: Final = pb.PREFIX_EVENT_KIND_STORED
_REMOVED: Final = pb.PREFIX_EVENT_KIND_REMOVED
_CLEARED: Final = pb.PREFIX_EVENT_KIND_CLEARED
# The kinds of the core's log.
_KINDS: Final = {1: _STORED, 2: _REMOVED, 3: _CLEARED}


class Watcher:
    """Position of one client that watches a tenant's prefixes of one namespace."""

    __slots__ = (
        "_cursor",
        "_in_snapshot",
        "_incarnation",
        "_native",
        "_notified",
        "_revision",
        "_scope",
        "_was_cleared",
        "payer",
        "pool",
        "wake",
    )

    def __init__(
        self,
        pool: Pool,
        scope: tuple[str, str],
        request: pb.WatchPrefixesRequest,
        incarnation: int,
        wake: Callable[[], None],
        payer: str,
    ) -> None:
        """``scope``: the tenant and the namespace. ``wake`` is called when there may be something
        to take. Raises InvalidRequestError, RevisionTooOldError.
        """
        since = request.since_revision
        if since < 0:
            raise InvalidRequestError("must not be negative", field="since_revision")
        if since and request.incarnation != incarnation:
            raise RevisionTooOldError(
                "is of another run of the control plane: start again from a snapshot",
                field="since_revision",
            )
        self.pool = pool
        self.payer = payer
        self._scope = scope
        self._incarnation = incarnation
        self._native = pool.native
        self._in_snapshot = not since
        self._was_cleared = bool(since)
        self._cursor = _END if since else 0
        self._revision = self._notified = since
        self.wake = wake

    def take(self) -> pb.WatchPrefixesResponse | None:
        """Return the next message to send, None when there is none. Raises RevisionTooOldError."""
        pool = self.pool
        if self._native is not pool.native:
            self._native = pool.native
            self._in_snapshot, self._was_cleared, self._cursor = True, False, 0
        if not self._was_cleared:
            self._was_cleared = True
            return self._response([pb.PrefixEvent(kind=_CLEARED)])
        if self._cursor != _END:
            # Blocks that are being forgotten may still be there.
            return self._part() if pool.built and not pool.is_forgetting else None
        return self._changes()

    def _part(self) -> pb.WatchPrefixesResponse:
        """Return the next part of the snapshot of cached blocks; the only part also ends it."""
        pool, is_first = self.pool, self._cursor == 0
        self._cursor, revision, tiers, hashes, parents, token_ids = pool.primary.snapshot(
            self._root, self._cursor, _MAX_ELEMENTS
        )
        if is_first:
            self._revision = pool.revision_of(revision)
        if is_first and self._cursor == _END:
            self._in_snapshot = False
        stored = pb.PrefixEvent(
            kind=_STORED, hashes=hashes, tiers=tiers, parent_hashes=parents, token_ids=token_ids
        )
        return self._response([stored] if hashes else [])

    def _changes(self) -> pb.WatchPrefixesResponse | None:
        pool = self.pool
        found = pool.primary.changes_since(
            pool.native_revision_of(self._revision), self._root, _MAX_ELEMENTS
        )
        if found is None:
            raise RevisionTooOldError(
                f"changes since revision {self._revision} are not kept any more: start again from "
                "a snapshot",
                field="since_revision",
            )
        revision, *columns = found
        self._revision = pool.revision_of(revision)
        events = _events(*columns, block_bytes=4 * pool.block_size)
        if not events and self._in_snapshot:
            self._in_snapshot = False
        elif not events and self._revision - self._notified < _MAX_UNNOTIFIED:
            return None
        return self._response(events)

    @property
    def _root(self) -> bytes:
        return root_of(self.pool.layout.fingerprint, *self._scope)

    def _response(self, events: list[pb.PrefixEvent]) -> pb.WatchPrefixesResponse:
        """Return a message of these events, with the revision that they complete, if they do."""
        self._notified = self._revision
        return pb.WatchPrefixesResponse(
            incarnation=self._incarnation,
            events=events,
            revision=0 if self._in_snapshot else self._revision,
        )


class Watchers:
    """Holds all clients that watch prefix indexes of this control plane."""

    def __init__(self, incarnation: Callable[[], int], most: int) -> None:
        """``most``: how many watchers there may be at one time."""
        self._incarnation = incarnation
        self._most = most
        self._payers: Counter[str] = Counter()

    def add(
        self,
        pool: Pool,
        request: pb.WatchPrefixesRequest,
        tenant: str,
        wake: Callable[[], None],
        payer: str = "",
    ) -> Watcher:
        """Watch a tenant's namespace in a pool's prefix index, until ``remove``.

        ``wake`` is called when there may be something to take. ``payer``: the account that the
        watcher counts for; a quarter of the places is for others. Raises InvalidRequestError,
        QuotaExceededError, RevisionTooOldError.
        """
        check_namespace(request.namespace)
        for num, most in (
            (self._payers.total(), self._most),
            (self._payers[payer], self._most - self._most // 4),
        ):
            if num >= most:
                raise QuotaExceededError(f"{most} streams watch prefix indexes: end one first")
        scope = tenant, request.namespace
        watcher = Watcher(pool, scope, request, self._incarnation(), wake, payer)
        pool.add_watcher(watcher)
        self._payers[payer] += 1
        return watcher

    def remove(self, watcher: Watcher) -> None:
        """End what ``add`` began for this watcher."""
        watcher.pool.watchers.remove(watcher)
        self._payers -= Counter([watcher.payer])


def _events(
    kinds: bytes,
    tiers: bytes,
    hashes: bytes,
    parent_hashes: bytes,
    token_ids: bytes,
    *,
    block_bytes: int,
) -> list[pb.PrefixEvent]:
    """Convert columns of changes to events: one for each run of changes of one kind."""
    events: list[pb.PrefixEvent] = []
    begin = first_stored = 0
    for number, run in groupby(kinds):
        num = sum(1 for _ in run)
        end, event = begin + num, pb.PrefixEvent(kind=_KINDS[number])
        of_run = slice(begin * HASH_BYTES, end * HASH_BYTES)
        if event.kind != _CLEARED:
            event.hashes = hashes[of_run]
            event.tiers = tiers[begin:end]
        if event.kind == _STORED:
            event.parent_hashes = parent_hashes[of_run]
            last_stored = first_stored + num
            event.token_ids = token_ids[first_stored * block_bytes : last_stored * block_bytes]
            first_stored = last_stored
        events.append(event)
        begin = end
    return events
