"""How much memory a pool may take: the machine is asked, not guessed."""

from __future__ import annotations

from pathlib import Path

import torch

from kvplane.errors import NeverFitsError

_MEMINFO = Path("/proc/meminfo")
# (limit, use) of control groups, version 2 and then 1. A container's limit is often below the
# machine's free memory.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on ``device`` now."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    free = _available_bytes()
    for limit_file, use_file in _CGROUPS:
        limit, used = _read_int(limit_file), _read_int(use_file)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def measure_num_blocks(
    free: int, block_bytes: int, *, utilization: float, reserve_bytes: int
) -> int:
    """Blocks that fit in ``free`` bytes x ``utilization`` less ``reserve_bytes``.

    Raises NeverFitsError when none does.
    """
    num_blocks = (int(free * utilization) - reserve_bytes) // block_bytes
    if num_blocks < 1:
        raise NeverFitsError(
            f"{free} free bytes x {utilization} - {reserve_bytes} bytes hold no block of "
            f"{block_bytes} bytes",
            field="num_device_blocks",
        )
    return num_blocks


def _available_bytes() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NeverFitsError(f"{_MEMINFO} does not say what is available; set num_device_blocks")


def _read_int(path: Path) -> int | None:
    """None when the file is missing, or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
