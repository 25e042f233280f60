"""Notes the prefixes that new sequences find: one that is used a second time is worth a file. With
``num_uses`` of 1 it notes the prompts of new sequences, found or not.

A prefix waits here until all of it is published. Blocks from the host tier are published again, in
other blocks, with the receipt of the plan that copies them, and a session can find blocks that it
is still computing. In a pool that keeps states a prefix ends at its deepest checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.plan_columns import Mask
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.plans.tables.change_columns import REPLACE, SET
from data_plane.tier_keys import tier_key_of
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb

MAX_NOTED = 1024
_MOST_LOOKS = 256
_DEVICE, _HOST = tier_key_of(0, pb.TIER_DEVICE), tier_key_of(0, pb.TIER_HOST)


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """Leading blocks of a new sequence's prompt: those that it found, or all with 1 use.

    ``blocks`` and ``generations``: [num_blocks]. ``token_ids``: int32 column of the tokens of all
    of them. ``checkpoints``: the block and generation of each checkpoint of states, by the place in
    ``blocks`` of the one at whose end it is.
    """

    tenant: str
    namespace: str
    blocks: NDArray[np.int32]
    generations: NDArray[np.int64]
    token_ids: bytes
    checkpoints: dict[int, tuple[int, int]]


@dataclass(slots=True)
class _Noted:
    blocks: NDArray[np.int32]
    generations: NDArray[np.int64]
    num_looks: int = 0


class ReusedBlocks:
    """Records which prefixes new sequences find, for an executor of one layer group and perhaps one
    of states. Not thread-safe: the executor's lock guards it.
    """

    def __init__(self, tables: BlockTables, on_reuse: Callable[[], None], num_uses: int) -> None:
        """``on_reuse`` is called when ``take`` may have more than before. ``num_uses``: 1 to note
        prompts as they are computed, 2 to note what was found.
        """
        self.num_dropped = 0
        """Prefixes that were dropped because too many waited for ``take``."""
        self._tables = tables
        self._on_reuse = on_reuse
        self._is_eager = num_uses == 1
        self._noted: deque[_Noted] = deque()

    def note(self, plan: plan_pb2.Plan, transfers: Transfers) -> None:
        """Record the prefixes that a plan's admitted sequences found. The plan's changes must have
        been applied, so that they are known to be valid.
        """
        changes = plan.changes
        if plan.resync or not changes.kinds:
            return
        kinds = np.frombuffer(changes.kinds, np.uint8)
        is_new = (kinds == SET) & (np.frombuffer(changes.first_blocks, "<i4") == 0)
        if changes.groups:
            is_new &= np.frombuffer(changes.groups, np.uint8) == 0
        if not is_new.any():
            return
        # Entries of one change follow those of another; only SET and REPLACE have entries.
        counts = np.where(kinds <= REPLACE, np.frombuffer(changes.num_blocks, "<i4"), 0)
        ends = np.cumsum(counts)
        blocks = np.frombuffer(changes.indices, "<i4")
        generations = np.frombuffer(changes.generations, "<i8")
        is_found = np.frombuffer(changes.allocated, np.uint8) == 0
        is_found |= np.isin(blocks, _from_host(transfers))
        is_on_device = np.frombuffer(changes.tiers, np.uint8) == pb.TIER_DEVICE
        for i in np.flatnonzero(is_new & is_on_device).tolist():
            begin = int(ends[i] - counts[i])
            end = int(ends[i])
            if not self._is_eager:
                end = begin + _num_leading(is_found[begin:end])
            if end > begin:
                self._add(_Noted(blocks[begin:end], generations[begin:end]))

    def published(self) -> None:
        """Call ``on_reuse`` if recorded prefixes wait, because blocks were published now."""
        if self._noted:
            self._on_reuse()

    def take(self) -> list[ReusedPrefix]:
        """Return each recorded prefix once, except those that still wait for a receipt."""
        taken = []
        noted, self._noted = self._noted, deque()
        for each in noted:
            is_present = self._tables.generations[_DEVICE][each.blocks] == each.generations
            is_whole = is_present & self._tables.publications[0].published[each.blocks]
            num = num_whole = _num_leading(is_whole)
            checkpoints = self._checkpoints(each.blocks[:num], each.generations[:num])
            if self._tables.state_group is not None:
                num = max(checkpoints, default=-1) + 1
            # The last block of a prompt may be filled later, or never.
            enough = max(1, len(is_present) - self._is_eager)
            # A checkpoint is published right after its block, if it ever is.
            each.num_looks += _MOST_LOOKS // 8 if num < enough <= num_whole else 1
            is_awaited = num < enough and is_present[num]
            if is_awaited and each.num_looks < _MOST_LOOKS:
                self._noted.append(each)
            elif num:
                taken.append(self._prefix(each.blocks[:num], each.generations[:num], checkpoints))
        return taken

    def drop(self, tenant: str | None) -> None:
        """Drop the recorded prefixes of a tenant, or of all tenants for None."""
        for each in self.take():
            if tenant not in (None, each.tenant):
                self._add(_Noted(each.blocks, each.generations))

    def _add(self, noted: _Noted) -> None:
        if len(self._noted) >= MAX_NOTED:
            self._noted.popleft()
            self.num_dropped += 1
        self._noted.append(noted)
        self._on_reuse()

    def _checkpoints(
        self, blocks: NDArray[np.int32], generations: NDArray[np.int64]
    ) -> dict[int, tuple[int, int]]:
        """Return the published checkpoints at the ends of blocks, as ``ReusedPrefix`` has them."""
        group = self._tables.state_group
        if group is None:
            return {}
        present = self._tables.generations[tier_key_of(group, pb.TIER_DEVICE)]
        found = self._tables.publications[group].children(blocks, generations)
        return {place: (block, int(present[block])) for place, block in found.items()}

    def _prefix(
        self,
        blocks: NDArray[np.int32],
        generations: NDArray[np.int64],
        checkpoints: dict[int, tuple[int, int]],
    ) -> ReusedPrefix:
        (tenant, namespace, _), token_ids = self._tables.publications[0].contents(blocks)
        column = token_ids.astype("<i4").tobytes()
        return ReusedPrefix(tenant, namespace, blocks, generations, column, checkpoints)


def _from_host(transfers: Transfers) -> NDArray[np.int64]:
    """Return the device blocks that transfers fill from the host tier."""
    is_up: Mask = transfers.sources.tier_keys == _HOST
    return transfers.destinations.blocks[is_up]


def _num_leading(mask: Mask) -> int:
    return len(mask) if mask.all() else int(mask.argmin())
