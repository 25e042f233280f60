"""Prefixes whose files data planes are to delete, until each has said that it did.

    Forget ──► told at once ──► (blocks withdrawn) ──► told again ──► FilesForgotten ──► done

The second time counts: until blocks are withdrawn, a plan made before may have them written again.
It is repeated to a shard that comes back, also as another process, because files outlive both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from kvplane.v1 import control_pb2 as cpb

# Of which each shard with files may still have to hear; beyond, all files are forgotten instead.
MAX_WAITING: Final = 1024


class FileForgets:
    """Of one pool."""

    def __init__(self) -> None:
        self._last_id = 0
        self._early: list[cpb.ForgetFiles] = []  # told once
        self._waiting: OrderedDict[int, tuple[set[int], cpb.ForgetFiles]] = OrderedDict()

    @property
    def has_early(self) -> bool:
        """Whether some are to be told again, once what they are of is withdrawn."""
        return bool(self._early)

    def add(self, message: cpb.ForgetFiles) -> list[cpb.RegisterResponse]:
        """What shards with files are to be told at once."""
        self._early.append(message)
        return [_response(message)]

    def told_again(self, shards: Iterable[int]) -> list[cpb.RegisterResponse]:
        """What the shards with files are to be told when blocks have been withdrawn."""
        early, self._early = self._early, []
        of_shards = frozenset(shards)
        for forget_id, (waiting, _) in [*self._waiting.items()]:
            waiting &= of_shards  # the pool may be divided in another way by now
            if not waiting:
                del self._waiting[forget_id]
        if len(self._waiting) + len(early) > MAX_WAITING:
            self._waiting.clear()
            early = [cpb.ForgetFiles(all_tenants=True)]
        for message in early:
            self._last_id += 1
            message.forget_id = self._last_id
            self._waiting[message.forget_id] = set(of_shards), message
        return [_response(message) for message in early]

    def done(self, forget_id: int, shard_index: int) -> None:
        """A shard has deleted the files."""
        waiting, _ = self._waiting.get(forget_id, (set[int](), None))
        waiting.discard(shard_index)
        if not waiting:
            self._waiting.pop(forget_id, None)

    def of_shard(self, shard_index: int) -> list[cpb.RegisterResponse]:
        """What a shard may not have heard."""
        return [
            _response(message)
            for waiting, message in self._waiting.values()
            if shard_index in waiting
        ]


def _response(message: cpb.ForgetFiles) -> cpb.RegisterResponse:
    return cpb.RegisterResponse(forget_files=message)
