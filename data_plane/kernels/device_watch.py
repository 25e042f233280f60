"""Finds out, after something failed, whether the device works still."""

from __future__ import annotations

from collections.abc import Callable

from data_plane.kernels.cuda_streams import Streams
from kvplane.errors import InternalError


class DeviceWatch:
    """Of one device. A call that fails once is its caller's matter. But there are failures after
    which every call of the process fails: then only a new process can use the device again.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._tell: Callable[[], None] | None = None

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, on the thread that asks, when the device is found to be lost."""
        self._tell = tell

    def check(self) -> None:
        """Ask the device, after an InternalError."""
        try:
            self._streams.drain()
        except InternalError:
            tell, self._tell = self._tell, None
            if tell is not None:
                tell()
