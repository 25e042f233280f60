"""Which tenant's data a block may hold, to clear it before another tenant can read it."""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.table_changes import AllocatedBlocks
from data_plane.plans.transfers import Transfers
from kvplane.v1 import types_pb2 as pb

BlocksByTier = dict["pb.Tier", NDArray[np.int64]]


class LastTenants:
    """The last tenant of each block, by tier.

    A tenant is kept as a digest of 64 bits, so that former tenants cost no memory. The digest is
    keyed, so that nobody can look for two tenants whose digests collide.
    """

    def __init__(self, num_blocks: dict[pb.Tier, int]) -> None:
        self._key = secrets.token_bytes(16)
        self._last = {tier: np.zeros(n, np.uint64) for tier, n in num_blocks.items()}

    def to_clear(
        self, tenant: str, allocated: AllocatedBlocks, transfers: Transfers
    ) -> BlocksByTier:
        """Of the blocks that a plan of ``tenant`` allocates, those that may hold another tenant's
        data and that no transfer of the plan overwrites first. A tier without any is left out.
        """
        own = self._digest(tenant)
        found = {}
        for tier, new in allocated.items():
            blocks = np.unique(new.blocks)
            last = self._last[tier][blocks]
            blocks = blocks[(last != 0) & (last != own)]
            if len(blocks):
                # A transfer overwrites all of its block. A block that transfers also read may be
                # read before it is overwritten, so it is cleared.
                ends = transfers.destinations, transfers.sources
                filled, read = (e.blocks[e.tiers == tier] for e in ends)
                blocks = blocks[~np.isin(blocks, filled) | np.isin(blocks, read)]
            if len(blocks):
                found[tier] = blocks
        return found

    def take_over(self, tenant: str, allocated: AllocatedBlocks) -> None:
        """Note the tenant of ``allocated``, once the clears and transfers are queued."""
        own = self._digest(tenant)
        for tier, new in allocated.items():
            self._last[tier][new.blocks] = own

    def _digest(self, tenant: str) -> int:
        """The tenant's digest, never 0, which stands for no tenant."""
        digest = hashlib.blake2b(tenant.encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1
