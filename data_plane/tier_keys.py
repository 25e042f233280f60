"""Tier keys: each names one tier of one layer group. Every tier key has its own blocks.

tier_key = 2 * group + tier        with one layer group, the keys are the tiers themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.wire.v1 import types_pb2 as pb

TierKey: TypeAlias = int
TIERS: Final = (pb.TIER_DEVICE, pb.TIER_HOST)


def tier_key_of(group: int, tier: int) -> TierKey:
    """Return the key of a layer group's tier."""
    return len(TIERS) * group + tier


def group_of(tier_key: TierKey) -> int:
    """Return the index of the key's layer group."""
    return (tier_key - 1) // len(TIERS)


def tier_of(tier_key: TierKey) -> pb.Tier:
    """Return the key's tier."""
    return TIERS[(tier_key - 1) % len(TIERS)]


def tier_keys_of(layout: Layout) -> list[TierKey]:
    """Return the tier keys of a layout, group after group."""
    return [tier_key_of(group, tier) for group in range(len(layout.groups)) for tier in TIERS]


def in_groups(num_blocks: int | Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the number of blocks of each layer group; a single number stands for each of them."""
    if isinstance(num_blocks, int):
        return (num_blocks,) * len(layout.groups)
    return tuple(num_blocks)


def check_group(group: int, layout: Layout, field: str) -> int:
    """Return the layer group if it exists; raises InvalidRequestError naming ``field`` if not."""
    last = len(layout.groups) - 1
    if not 0 <= group <= last:
        raise InvalidRequestError(no_group(group, last), field=field)
    return group


def no_group(group: int, last: int) -> str:
    """Return the error message for a layer group that does not exist. ``last``: the last index."""
    has = f"groups 0 to {last}" if last else "group 0 only"
    return f"there is no layer group {group}: this pool has {has}"
