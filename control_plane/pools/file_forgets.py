"""Prefixes whose files data planes are to delete, until each has said that it did.

    Forget ──► told at once ──► (blocks withdrawn) ──► told again ──► FilesForgotten ──► done

The second time counts: until blocks are withdrawn, a plan made before may have them written again.
It is repeated to a shard that comes back, also as another process, because files outlive both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvplane.v1 import control_pb2 as cpb

# Of a tenant, of which each shard with files may still have to hear: 1 for each message and for
# each KiB of token ids. Beyond, all files of the tenant are forgotten instead. One message alone
# may be larger: shards that are there are told it as it is, and for others all files are kept.
MAX_WAITING: Final = 1024


class FileForgets:
    """Of one pool, which bounds the number of its tenants."""

    def __init__(self) -> None:
        self._last_id = 0
        self._shards: frozenset[int] = frozenset()  # when last told
        self._early: dict[str, list[cpb.ForgetFiles]] = {}  # told once, by tenant
        self._waiting: dict[int, tuple[set[int], cpb.ForgetFiles]] = {}
        self._ids: dict[str, set[int]] = {}  # of these, by tenant
        self._sizes: dict[str, int] = {}  # of a tenant's messages, early ones too

    @property
    def has_early(self) -> bool:
        """Whether some are to be told again, once what they are of is withdrawn."""
        return bool(self._early)

    def add(self, message: cpb.ForgetFiles) -> list[cpb.RegisterResponse]:
        """What shards with files are to be told at once."""
        tenant = message.tenant
        held = self._sizes.get(tenant, 0)
        if held and held + _size(message) > MAX_WAITING:
            for forget_id in self._ids.pop(tenant, ()):
                del self._waiting[forget_id]
            self._early.pop(tenant, None)
            self._sizes[tenant] = 0
            message = cpb.ForgetFiles(tenant=tenant, all_namespaces=True)
        self._early.setdefault(tenant, []).append(message)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + _size(message)
        return [_response(message)]

    def told_again(self, shards: Iterable[int]) -> list[cpb.RegisterResponse]:
        """What the shards with files are to be told when blocks have been withdrawn."""
        of_shards = frozenset(shards)
        if of_shards != self._shards:  # the pool may be divided in another way by now
            self._shards = of_shards
            for forget_id, (waiting, _) in [*self._waiting.items()]:
                waiting &= of_shards
                self._drop_if_done(forget_id)
        early, self._early = self._early, {}
        messages = [message for of_tenant in early.values() for message in of_tenant]
        for message in messages:
            self._last_id += 1
            message.forget_id = self._last_id
            self._waiting[self._last_id] = set(of_shards), self._kept(message)
            self._ids.setdefault(message.tenant, set()).add(self._last_id)
            self._drop_if_done(self._last_id)
        return [_response(message) for message in messages]

    def done(self, forget_id: int, shard_index: int) -> None:
        """A shard has deleted the files."""
        if forget_id in self._waiting:
            self._waiting[forget_id][0].discard(shard_index)
            self._drop_if_done(forget_id)

    def of_shard(self, shard_index: int) -> list[cpb.RegisterResponse]:
        """What a shard may not have heard."""
        return [
            _response(message)
            for waiting, message in self._waiting.values()
            if shard_index in waiting
        ]

    def _kept(self, message: cpb.ForgetFiles) -> cpb.ForgetFiles:
        """What is told to shards that come back."""
        if _size(message) <= MAX_WAITING:
            return message
        kept = cpb.ForgetFiles(
            forget_id=message.forget_id, tenant=message.tenant, all_namespaces=True
        )
        self._sizes[message.tenant] -= _size(message) - _size(kept)
        return kept

    def _drop_if_done(self, forget_id: int) -> None:
        waiting, message = self._waiting[forget_id]
        if waiting:
            return
        del self._waiting[forget_id]
        tenant = message.tenant
        self._ids[tenant].discard(forget_id)
        self._sizes[tenant] -= _size(message)
        if not self._ids[tenant]:
            del self._ids[tenant]
        if not self._sizes[tenant]:
            del self._sizes[tenant]


def _size(message: cpb.ForgetFiles) -> int:
    return 1 + len(message.token_ids) // 1024


def _response(message: cpb.ForgetFiles) -> cpb.RegisterResponse:
    return cpb.RegisterResponse(forget_files=message)
