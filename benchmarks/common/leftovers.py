"""What earlier cases left behind: it is no part of what is measured next."""

from __future__ import annotations

import ctypes
import gc


def drop_leftovers() -> None:
    """Collect garbage, uncounted, and give freed memory back to the kernel: glibc does that when
    the last of it is freed, all at once, and 300 MB take 25 ms wherever that happens to be.
    """
    counting = gc.callbacks[:]
    gc.callbacks.clear()
    gc.collect()
    gc.callbacks.extend(counting)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
