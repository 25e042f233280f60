"""Remembers whose data a block may hold, to clear it before another tenant can read it."""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.tables.allocations import AllocatedBlocks
from data_plane.tier_keys import TierKey

BlocksByTier = dict[TierKey, NDArray[np.int64]]


class LastTenants:
    """Remembers, for each block, which tenant's data it may hold.

    Each block stores its tenant as a 64-bit digest, so that memory does not grow with the number
    of tenants. The digest is keyed, so that nobody can search for two whose digests collide.
    """

    def __init__(self, num_blocks: dict[TierKey, int]) -> None:
        self._key = secrets.token_bytes(16)
        self._last = {tier_key: np.zeros(n, np.uint64) for tier_key, n in num_blocks.items()}

    def to_clear(
        self, tenant: str, allocated: AllocatedBlocks, transfers: Transfers
    ) -> tuple[BlocksByTier, BlocksByTier]:
        """Return the blocks to clear before the transfers of a plan of ``tenant``, and after them:
        those that the plan allocates, that may hold another tenant's data, and that no transfer
        overwrites first. A tier without any is left out.

        A block that transfers read as it was before the plan is cleared after them.
        """
        before: BlocksByTier = {}
        after: BlocksByTier = {}
        if not allocated:
            return before, after
        own = self._digest(tenant)
        is_former = transfers.reads_former(allocated)
        for tier_key, new in allocated.items():
            last = self._last[tier_key][new.blocks]
            blocks = new.blocks[(last != 0) & (last != own)]
            if not len(blocks):
                continue
            blocks = np.unique(blocks)
            sources, destinations = transfers.sources, transfers.destinations
            of_tier = sources.tier_keys == tier_key
            saved = np.isin(blocks, sources.blocks[of_tier & is_former])
            # A transfer overwrites all of its block. A block that transfers also read may be read
            # before it is overwritten, so it is cleared.
            read = np.isin(blocks, sources.blocks[of_tier & ~is_former])
            filled = np.isin(blocks, destinations.blocks[destinations.tier_keys == tier_key])
            for found, wanted in ((before, ~saved & (~filled | read)), (after, saved & ~filled)):
                if wanted.any():
                    found[tier_key] = blocks[wanted]
        return before, after

    def take_over(self, tenant: str, allocated: AllocatedBlocks, transfers: Transfers) -> None:
        """Record whose data the blocks of ``allocated`` hold once the clears and transfers are
        queued: the tenant's, or that of the block that a transfer copied.
        """
        if not allocated:
            return
        own = self._digest(tenant)
        if not len(transfers):
            for tier_key, new in allocated.items():
                self._last[tier_key][new.blocks] = own
            return
        sources, destinations = transfers.sources, transfers.destinations
        copied = np.zeros(len(transfers), np.uint64)
        is_new = ~transfers.reads_former(allocated)
        for tier_key, last in self._last.items():
            of_tier = np.flatnonzero(sources.tier_keys == tier_key)
            copied[of_tier] = last[sources.blocks[of_tier]]
            if tier_key in allocated:
                is_new[of_tier] &= allocated[tier_key].before(sources.blocks[of_tier]) >= 0
                last[allocated[tier_key].blocks] = own
            else:
                is_new[of_tier] = False
        copied = np.where(copied == 0, own, copied)
        if not is_new.any():
            for tier_key, last in self._last.items():
                of_tier = np.flatnonzero(destinations.tier_keys == tier_key)
                last[destinations.blocks[of_tier]] = copied[of_tier]
            return
        for i, (source, tier_key) in enumerate(
            zip(sources.tier_keys.tolist(), destinations.tier_keys.tolist(), strict=True)
        ):
            if is_new[i]:  # written by an earlier transfer, or cleared
                copied[i] = self._last[source][sources.blocks[i]]
            self._last[tier_key][destinations.blocks[i]] = copied[i]

    def _digest(self, tenant: str) -> int:
        """Return the tenant's digest, never 0, which stands for no tenant."""
        digest = hashlib.blake2b(tenant.encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1
