"""Drops what earlier cases left behind, so that it does not count in the next measurement."""

from __future__ import annotations

import ctypes
import gc


def drop_leftovers() -> None:
    """Collect garbage, untimed, and return freed memory to the kernel. glibc would return 300 MB at
    once, which takes 25 ms, in whichever call frees the last of it.
    """
    counting = gc.callbacks[:]
    gc.callbacks.clear()
    gc.collect()
    gc.callbacks.extend(counting)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
