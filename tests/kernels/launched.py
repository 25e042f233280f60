"""Which kernels the emulator has launched, in order."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from types import ModuleType

# In the type of a launch's call. A kernel with template arguments is there with its parameters:
# `launch_when<&(void kvplane::cuda::attend_short<__half, 64, 1, 4>(kvplane::cuda::Work)), ...`
_KERNEL = re.compile(r"launch_when<&\(?(?:void )?(\w+)(?:<([^()]*)>)?[,(]")
_PLACES = re.compile(r"kvplane::cuda::|\(anonymous namespace\)::")


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel."""

    kernel: str
    arguments: tuple[str, ...]
    """Of its template."""


def launched_kernels(module: ModuleType) -> list[Launched]:
    """The launches since the last call of this function; the latest 256 at most."""
    assert module.__file__ is not None
    read = ctypes.CDLL(module.__file__).kvplane_launched_kernels
    read.restype = ctypes.c_char_p
    return [_launched(line) for line in read().decode().splitlines()]


def _launched(line: str) -> Launched:
    found = _KERNEL.search(_PLACES.sub("", line))
    assert found is not None, line
    name, arguments = found.groups()
    listed = arguments.split(", ") if arguments else []
    return Launched(name, tuple(listed))
