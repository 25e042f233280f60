"""The machine that a measurement ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_now() -> str:
    """Return the machine and its present load."""
    load = os.getloadavg()[0]
    return f"{cpu_name()}, {os.cpu_count()} virtual processors, load {load:.1f} at the beginning"
