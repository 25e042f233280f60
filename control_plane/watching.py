"""Followers of a pool's prefix index: a snapshot of one root's blocks, then each change to them.

A follower has no queue. It keeps its position in the core's log of changes and takes the next ones
when it has sent those before, so a slow one costs nothing. When the log does not reach back to its
position any more, it has to start again.

    snapshot ──► changes made meanwhile ──► end of the snapshot ──► changes ...
       ▲                                                               │
       └────────── cleared: a data plane has restarted ◄───────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Final

from control_plane.pools.pool import Pool
from control_plane.pools.publications import HASH_BYTES, MAX_NAMESPACE_CHARACTERS, root_of
from kvplane.errors import InvalidRequestError, QuotaExceededError, RevisionTooOldError
from kvplane.wire.v1 import control_pb2 as cpb

# Blocks or changes of one message.
_MAX_ELEMENTS: Final = 1024
# Changes of others after which a follower gets the revision, to resume from it.
_MAX_UNNOTIFIED: Final = 4096
_END: Final = -1
_STORED, _REMOVED, _CLEARED = 1, 2, 3


class Follower:
    """One follower of a tenant's prefixes of one namespace."""

    __slots__ = (
        "_cursor",
        "_in_snapshot",
        "_incarnation",
        "_native",
        "_notified",
        "_revision",
        "_scope",
        "pool",
        "wake",
    )

    def __init__(
        self,
        pool: Pool,
        scope: tuple[str, str],
        request: cpb.WatchRequest,
        incarnation: int,
        wake: Callable[[], None],
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
        self._scope = scope
        self._incarnation = incarnation
        self._native = pool.native
        self._in_snapshot = not since
        self._cursor = _END if since else 0
        self._revision = self._notified = since
        self.wake = wake

    def take(self) -> cpb.WatchResponse | None:
        """Return the next message, None when there is none now. Raises RevisionTooOldError."""
        pool = self.pool
        if self._native is not pool.native:
            self._native = pool.native
            self._in_snapshot, self._cursor = True, 0
            if self._notified:
                self._notified = 0
                cleared = cpb.Change(cleared=cpb.Cleared())
                return self._response(
                    changes=cpb.Changes(changes=[cleared], revision=pool.revision())
                )
        if self._cursor != _END:
            # Blocks that are being forgotten may still be there.
            return self._part() if pool.built and not pool.is_forgetting else None
        return self._changes()

    def _part(self) -> cpb.WatchResponse:
        """Return the next part of the snapshot, marked as the last if it is the only one."""
        pool, is_first = self.pool, self._cursor == 0
        self._cursor, revision, tiers, hashes, parents, token_ids = pool.primary.snapshot(
            self._root, self._cursor, _MAX_ELEMENTS
        )
        if is_first:
            self._revision = pool.revision_of(revision)
        if is_first and self._cursor == _END:
            self._in_snapshot = False
        stored = cpb.Stored(hashes=hashes, parent_hashes=parents, token_ids=token_ids, tiers=tiers)
        return self._snapshot(stored)

    def _changes(self) -> cpb.WatchResponse | None:
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
        changes = _messages(*columns, block_bytes=4 * pool.block_size)
        if not changes and self._in_snapshot:
            self._in_snapshot = False
            return self._snapshot(cpb.Stored())
        if not changes and self._revision - self._notified < _MAX_UNNOTIFIED:
            return None
        return self._response(changes=cpb.Changes(changes=changes, revision=self._revision))

    @property
    def _root(self) -> bytes:
        return root_of(self.pool.layout.fingerprint, *self._scope)

    def _snapshot(self, stored: cpb.Stored) -> cpb.WatchResponse:
        last = not self._in_snapshot
        return self._response(
            snapshot=cpb.Snapshot(stored=stored, last=last, revision=self._revision)
        )

    def _response(
        self, *, snapshot: cpb.Snapshot | None = None, changes: cpb.Changes | None = None
    ) -> cpb.WatchResponse:
        self._notified = self._revision
        return cpb.WatchResponse(incarnation=self._incarnation, snapshot=snapshot, changes=changes)


class Followers:
    """All followers of a control plane."""

    def __init__(self, incarnation: Callable[[], int], most: int) -> None:
        """``most``: how many there may be at one time."""
        self._incarnation = incarnation
        self._most = most
        self._num = 0

    def add(
        self, pool: Pool, request: cpb.WatchRequest, tenant: str, wake: Callable[[], None]
    ) -> Follower:
        """Follow a tenant's namespace in a pool's prefix index, until ``remove``.

        ``wake`` is called when there may be something to take. Raises InvalidRequestError,
        QuotaExceededError, RevisionTooOldError.
        """
        if len(request.namespace) > MAX_NAMESPACE_CHARACTERS:
            raise InvalidRequestError(
                f"must have at most {MAX_NAMESPACE_CHARACTERS} characters", field="namespace"
            )
        if self._num >= self._most:
            raise QuotaExceededError(f"{self._most} streams follow prefix indexes: end one first")
        follower = Follower(pool, (tenant, request.namespace), request, self._incarnation(), wake)
        pool.followers.add(follower)
        pool.keep_changes()
        self._num += 1
        return follower

    def remove(self, follower: Follower) -> None:
        """Remove a follower."""
        follower.pool.followers.remove(follower)
        self._num -= 1


def _messages(
    kinds: bytes,
    tiers: bytes,
    hashes: bytes,
    parent_hashes: bytes,
    token_ids: bytes,
    *,
    block_bytes: int,
) -> list[cpb.Change]:
    """Return changes from columns: one message for each run of a kind."""
    messages: list[cpb.Change] = []
    begin = first_stored = 0
    for kind, run in groupby(kinds):
        num = sum(1 for _ in run)
        end, message = begin + num, cpb.Change()
        of_run = slice(begin * HASH_BYTES, end * HASH_BYTES)
        if kind == _STORED:
            message.stored.hashes = hashes[of_run]
            message.stored.parent_hashes = parent_hashes[of_run]
            message.stored.tiers = tiers[begin:end]
            last_stored = first_stored + num
            message.stored.token_ids = token_ids[
                first_stored * block_bytes : last_stored * block_bytes
            ]
            first_stored = last_stored
        elif kind == _REMOVED:
            message.removed.hashes = hashes[of_run]
            message.removed.tiers = tiers[begin:end]
        else:
            assert kind == _CLEARED, kind
            message.cleared.SetInParent()
        messages.append(message)
        begin = end
    return messages
