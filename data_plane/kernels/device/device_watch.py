"""Finds out, after a failure, whether the device still works."""

from __future__ import annotations

from collections.abc import Callable

from data_plane.kernels.device.cuda_streams import Streams
from kvplane.errors import InternalError


class DeviceWatch:
    """Finds out whether a device is lost. Some failures end one call. After others, such as an
    illegal access, every call of the process fails, and only a new process can use the device
    again.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._on_lost: Callable[[], None] | None = None

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have ``check`` call ``call`` once, on its caller's thread, when the device is lost."""
        self._on_lost = call

    def check(self) -> None:
        """Test whether the device still works, after an InternalError."""
        try:
            self._streams.drain()
        except InternalError:
            call, self._on_lost = self._on_lost, None
            if call is not None:
                call()
