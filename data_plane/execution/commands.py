"""An executor's commands: one at a time, timed, and their rejections counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from data_plane.execution.counters import ExecutorCounters
from data_plane.kernels.device.device_watch import DeviceWatch
from kvplane.errors import InternalError, KvplaneError

Observer = Callable[[str, float], None]
"""Function that is called with each command's name and its duration in seconds."""


class Commands:
    """Makes contexts that time a command and count its rejection: ``with commands.lock,
    commands(name):``. Commands may be nested. The lock is separate, so that Python itself releases
    it wherever Ctrl-C comes.
    """

    def __init__(
        self, counters: ExecutorCounters, device_watch: DeviceWatch, observe: Observer | None
    ) -> None:
        self.lock = threading.RLock()
        """Held while a command runs."""
        self.depth = 0
        self.counters = counters
        self.device_watch = device_watch
        self.observe = observe

    def __call__(self, name: str) -> Command:
        return Command(self, name)


class Command:
    """The context of one command, used once. Not a generator: each layer is a command."""

    __slots__ = ("_began_s", "_commands", "_depth", "_name")

    def __init__(self, commands: Commands, name: str) -> None:
        self._commands = commands
        self._name = name

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()
        self._depth = self._commands.depth
        self._commands.depth += 1

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        commands = self._commands
        commands.depth = self._depth  # even if Ctrl-C cut off the end of a nested command
        try:
            if isinstance(error, KvplaneError) and not self._depth:
                commands.counters.num_rejections[error.reason] += 1
                if isinstance(error, InternalError):
                    commands.device_watch.check()
        finally:
            if commands.observe is not None:
                commands.observe(self._name, time.perf_counter() - self._began_s)
