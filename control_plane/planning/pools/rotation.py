"""Moves the keys of pools on, and waits for no engine.

A step of a rotation waits until every shard has confirmed it, however long one is away or silent:
meanwhile the pool works with the keys it has. Engines have no part in it. What the former key
signed and is still in use, grants of open sessions and plans in flight, is named to the shards by
digest when that key is dropped.

A shard that comes back says what keys it holds, and is sent the present step again. One that was
started anew gets the present key when it registers. Another control plane begins with a new key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

from control_plane.planning.pools.pool import Pool
from control_plane.planning.pools.shards import ShardState
from control_plane.planning.session import Session
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as cpb

_LOGGER: Final = logging.getLogger(__name__)
_LONG_S: Final = 10.0  # after which a step that waits is logged
_MAX_FORMER: Final = 16  # keys, for plans that were never receipted


class KeyRotation:
    """Of all pools."""

    def __init__(
        self, lifetime_s: float, sessions_of: Callable[[Pool], Collection[Session]]
    ) -> None:
        """``lifetime_s``: how long a key signs before the next is made; 0 is for ever."""
        self._lifetime_s = lifetime_s
        self._sessions_of = sessions_of

    def tick(self, pool: Pool, now_s: float) -> None:
        """Begin what is due, and log what waits for long. ``now_s``: monotonic seconds."""
        keys = pool.keys
        if keys.num_former:
            plans = (p for s in self._sessions_of(pool) for p in s.plans.values())
            keys.forget_former(plan.key_number for plan in plans)
        if keys.since_s is None:
            keys.since_s = now_s
        if keys.step_s is not None:
            if now_s - keys.step_s >= _LONG_S:
                self._is_late(pool, f"shards {unconfirmed(pool)}")
        elif keys.is_due or (self._lifetime_s and now_s - keys.since_s >= self._lifetime_s):
            if keys.num_former >= _MAX_FORMER:
                self._is_late(pool, "receipts of plans that are in flight")
            else:
                keys.make_next()
                self._begin_step(pool, "offered a new key")

    def replace(self, pool: Pool, number: int, now_s: float) -> cpb.RotateKeyResponse:
        """Begin to replace the key of this number, 0 for the one that signs, unless that has begun.
        ``now_s``: monotonic seconds. Raises InvalidRequestError for a number that there was not.
        """
        keys = pool.keys
        number = number or keys.number
        if not 0 < number <= keys.number:
            raise InvalidRequestError(f"must be at most {keys.number}", field="key_number")
        keys.is_due |= number == keys.number and not keys.next
        self.tick(pool, now_s)
        return cpb.RotateKeyResponse(
            key_number=number,
            done=number < keys.number - keys.is_retiring,
            unconfirmed_shards=unconfirmed(pool),
        )

    def _is_late(self, pool: Pool, waits_for: str) -> None:
        """Log it once."""
        if not pool.keys.is_late:
            pool.keys.is_late = True
            _LOGGER.warning("rotation of the key waits for %s pool=%r", waits_for, pool.id)

    def _begin_step(self, pool: Pool, what: str) -> None:
        """Tell all shards that are connected."""
        pool.keys.step_s, pool.keys.is_late = pool.now_s, False
        _LOGGER.info("%s pool=%r", what, pool.id)
        for state in pool.shards.states.values():
            if state.connected:
                state.outgoing.extend(self._messages(pool, state))
        pool.shards.tell()

    def registered(self, pool: Pool, hello: cpb.Hello, *, resumed: bool) -> None:
        """A shard was registered or resumed."""
        index = hello.shard.index
        held = {hello.key_id, hello.newer_key_id} if resumed else {pool.keys.present_id}
        state = pool.shards.states[index]
        state.key_ids = frozenset(held)
        if not self._advance(pool):
            state.outgoing.extend(self._messages(pool, state))

    def held(self, pool: Pool, index: int, held: cpb.KeysHeld) -> None:
        """A shard says what keys it holds. Raises InvalidRequestError."""
        for field in ("key_id", "newer_key_id"):
            if len(getattr(held, field)) not in (0, 16):
                raise InvalidRequestError("must be 16 bytes", field=f"keys_held.{field}")
        pool.shards.states[index].key_ids = frozenset((held.key_id, held.newer_key_id))
        self._advance(pool)

    def _advance(self, pool: Pool) -> bool:
        """Take the next step if all shards have confirmed the present one; returns whether it was
        taken and the shards were told.
        """
        keys = pool.keys
        if unconfirmed(pool):
            return False
        if keys.next:
            keys.switch()
            keys.since_s = pool.now_s
            pool.statistics.num_key_rotations += 1
            for session in self._sessions_of(pool):
                session.last_of_former_key = session.last_plan
            self._begin_step(pool, "a new key signs")
            return True
        if keys.is_retiring:
            keys.is_retiring, keys.step_s = False, None
            _LOGGER.info("the former key is dropped pool=%r", pool.id)
        return False

    def _messages(self, pool: Pool, state: ShardState) -> list[cpb.RegisterResponse]:
        """What a shard is to be told of the present step."""
        keys = pool.keys
        if keys.next and state.hello.rotates_keys and keys.next_id not in state.key_ids:
            return [cpb.RegisterResponse(key_offer=cpb.KeyOffer(key=keys.next))]
        if keys.is_retiring and not _has_dropped(state, keys.present_id):
            sessions = self._sessions_of(pool)
            retirement = cpb.KeyRetirement(
                key_id=keys.present_id,
                grant_digests=b"".join(
                    s.grant_digest for s in sessions if s.grant_key_number != keys.number
                ),
                plan_digests=b"".join(
                    plan.digest
                    for session in sessions
                    for plan in session.plans.values()
                    if plan.key_number != keys.number
                ),
            )
            return [cpb.RegisterResponse(key_retirement=retirement)]
        return []


def unconfirmed(pool: Pool) -> list[int]:
    """Indices of the shards that a rotation waits for; none while there is no rotation."""
    keys, states = pool.keys, pool.shards.states
    if keys.next:
        next_id = keys.next_id
        return [
            i
            for i in range(pool.shards.num_shards)
            if i not in states or next_id not in states[i].key_ids
        ]
    if keys.is_retiring:
        present_id = keys.present_id
        return [i for i, state in states.items() if not _has_dropped(state, present_id)]
    return []


def _has_dropped(state: ShardState, present_id: bytes) -> bool:
    """Whether it holds the present key alone."""
    return state.key_ids <= {present_id, b""}
