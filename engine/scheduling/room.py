"""How many blocks the pool had left after the last step."""

from __future__ import annotations

from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as types


class Room:
    """``num_host_blocks``: free ones of the host tier."""

    def __init__(self) -> None:
        self.num_host_blocks = 0
        self._num_device_blocks: int | None = None  # None: not known yet

    def note(self, usage: pb.PoolUsage) -> None:
        """Learn it from a step's answer."""
        for tier in usage.tiers:
            if tier.tier == types.TIER_DEVICE:
                self._num_device_blocks = (
                    tier.num_free_blocks + tier.num_cached_blocks + tier.num_retired_blocks
                )
            elif tier.tier == types.TIER_HOST:
                self.num_host_blocks = tier.num_free_blocks

    def fits(self, num_blocks: int) -> bool:
        """Whether the device tier may have so many."""
        return self._num_device_blocks is None or num_blocks <= self._num_device_blocks
