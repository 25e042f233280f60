"""Counts the garbage collections of this process, or of a control plane run in it.

    python -m benchmarks.control_plane.gc_pauses FILE on|off FLAGS

runs ``python -m control_plane FLAGS`` with the collector on or off, and writes the pauses to FILE
when it ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


class Pauses:
    """A context manager that notes the collections during its block.

    ``found``: when each began, on a clock that processes share, and how long it took; in seconds.
    """

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._began_s = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self.found.append((self._began_s, now_s - self._began_s))


def main() -> None:
    """Run a control plane until a signal stops it or its parent process is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    out, state = Path(sys.argv.pop(1)), sys.argv.pop(1)
    if state == "off":
        gc.disable()
    with Pauses() as pauses:
        try:
            runpy.run_module("control_plane", run_name="__main__", alter_sys=True)
        finally:
            out.write_text(json.dumps(pauses.found))


if __name__ == "__main__":
    main()
