"""Computes how much memory a pool may take, and how many blocks each of its layer groups gets.

A sequence holds blocks for all its tokens in a group without a window. In one with a window it
holds those that the next tokens read, and those that a step computes. So groups get blocks in the
proportion in which a sequence of the expected length holds them, and one with a window never fewer
than the tokens of one step need.

A running sequence holds one checkpoint of its state, and a cached prompt is found at its last one.
So a group of states gets a block for each sequence of the expected length that the other groups
have room for, and never fewer than serve a few short sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from kvplane.errors import NeverFitsError
from kvplane.layout import STATE, LayerGroup, Layout

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# A container's limit is often below the machine's free memory. For control groups of version 2 and
# then 1: the files with the limit and the usage, and the key in memory.stat of that part of the
# usage which is reclaimed on demand (cached files that were not read lately).
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


STEP_TOKENS: Final = 2048
"""Maximum number of tokens of one sequence that a step is expected to compute."""
_MAX_BLOCKS: Final = 2**24
_LEAST_CHECKPOINTS: Final = 16


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can be allocated on ``device`` now."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    free = _available_bytes()
    for limit_file, use_file, reclaimable in _CGROUP_FILES:
        limit, used = _read_int(_CGROUP / limit_file), _read_int(_CGROUP / use_file)
        if limit is not None and used is not None:
            used -= _read_stat((_CGROUP / use_file).with_name("memory.stat"), reclaimable)
            free = min(free, max(0, limit - used))
    return free


def measure_num_blocks(
    free: int,
    fit: Callable[[int], int],
    *,
    utilization: float,
    reserve_bytes: int,
    scratch_bytes: int = 0,
) -> int:
    """Return how many blocks fit in ``free`` bytes x ``utilization`` - ``reserve_bytes``. ``fit``
    returns how many fit in a number of bytes.

    Where ``utilization`` would leave less than ``scratch_bytes`` free, that much is left instead.
    Raises NeverFitsError when no block fits.
    """
    usable = min(int(free * utilization), free - scratch_bytes)
    num_blocks = fit(usable - reserve_bytes)
    if num_blocks < 1:
        raise NeverFitsError(
            f"no block fits in {free} free bytes x {utilization} - {reserve_bytes} reserved "
            f"bytes, with {scratch_bytes} bytes left for the kernels",
            field="num_device_blocks",
        )
    return num_blocks


def share_blocks(layout: Layout, num_blocks: int, expected_tokens: int) -> tuple[int, ...]:
    """Divide a pool among its layer groups: return the number of blocks of each, when groups
    without a window have ``num_blocks``. ``expected_tokens``: of a typical sequence.
    """
    block_size = layout.block_size_tokens
    whole = -(-expected_tokens // block_size)

    def share(group: LayerGroup) -> int:
        if group.cache_kind == STATE and num_blocks:
            return max(_LEAST_CHECKPOINTS, -(-num_blocks // whole))
        if not group.sliding_window_tokens or num_blocks == 0 or len(layout.groups) == 1:
            return num_blocks
        least = -(-(group.sliding_window_tokens + STEP_TOKENS) // block_size) + 1
        held = min(whole, least)
        return min(num_blocks, max(-(-num_blocks * held // whole), least))

    return tuple(share(group) for group in layout.groups)


def fit_blocks(
    layout: Layout, usable_bytes: int, expected_tokens: int, block_bytes: Callable[[int], int]
) -> int:
    """Return the largest ``num_blocks`` for which all groups' ``share_blocks`` fit in
    ``usable_bytes``; 0 if none does. ``block_bytes``: the size of a block of each group.
    """
    sizes = [block_bytes(group) for group in range(len(layout.groups))]

    def num_bytes(num_blocks: int) -> int:
        shares = share_blocks(layout, num_blocks, expected_tokens)
        return sum(num * size for num, size in zip(shares, sizes, strict=True))

    return bisect_right(range(1, _MAX_BLOCKS + 1), usable_bytes, key=num_bytes)


def _available_bytes() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NeverFitsError(
        f"{_MEMINFO} does not say how much memory is available: set num_device_blocks"
    )


def _read_stat(path: Path, name: str) -> int:
    """Return a value of a cgroup's memory.stat file; 0 when it has none of this name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = (line.split() for line in lines if line.startswith(f"{name} "))
    return next((int(value) for _, value in values), 0)


def _read_int(path: Path) -> int | None:
    """Return the number in a cgroup's file; None when the file is missing or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
