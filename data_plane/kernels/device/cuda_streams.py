"""Orders a device's work: compute on the caller's stream, swaps on a separate stream.

    compute   layers ──┬────────────────────────────┬─► layers, copies, reads
                       │ a swap waits for all       │ compute waits for swaps when it next
                       ▼ compute queued before it   │ begins, not when they are queued
    swaps              swaps ───────────────────────┘

The effect is as if all work ran in the order in which it was queued, while the caller's own work on
its stream runs beside the swaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kvplane.errors import InternalError


@contextmanager
def device_errors() -> Iterator[None]:
    """Convert a failing device call, also for lack of memory, to an InternalError."""
    try:
        yield
    except RuntimeError as error:
        raise InternalError(f"the device failed: {error}") from error


class Streams(Protocol):
    """The streams that kernels are queued on. Used by one thread at a time."""

    def computing(self) -> AbstractContextManager[None]:
        """Queue the work inside on the caller's stream, after all work queued before."""

    def swapping(self) -> AbstractContextManager[None]:
        """Queue the work inside on the swaps' stream, after all work queued before."""

    def finish(self) -> None:
        """Wait until all queued work is done. Raises InternalError when the device failed."""

    def finish_swaps(self) -> None:
        """Wait until all swaps are done, so that the host can read the swapped blocks. Raises
        InternalError when the device failed.
        """

    def drain(self) -> None:
        """Wait until no stream of the device touches memory; any thread may call it. Raises
        InternalError when the device failed.
        """

    def use_own_stream(self) -> None:
        """Give the calling thread a new stream, whose work runs beside that of other streams."""


class HostStreams:
    """Streams of the CPU, where a call has finished when it returns."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    @contextmanager
    def swapping(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Do nothing: each call waits for its own work, so none is left."""

    def finish_swaps(self) -> None:
        """Do nothing: each swap waits for its own work, so none is left."""

    def drain(self) -> None:
        """Do nothing: each call waits for its own work, so none is left."""

    def use_own_stream(self) -> None:
        """Do nothing, because the CPU has no streams."""


class Runtime(Protocol):
    """A device's stream operations, as torch has them. A stream is a value that can be compared."""

    def current_stream(self) -> Any:
        """Return the stream that the calling thread queues work on."""

    def new_stream(self, *, urgent: bool = False) -> Any:
        """Make a stream. ``urgent``: its work has priority over that of other streams."""

    def set_stream(self, stream: Any) -> None:
        """Set the stream that the calling thread queues work on."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which the calling thread queues work on ``stream``."""

    def order(self, before: Any, after: Any) -> None:
        """Make work queued on ``after`` from now on wait for the work queued on ``before``."""

    def wait(self, stream: Any) -> None:
        """Block until all work queued on ``stream`` is done."""

    def wait_for_all(self) -> None:
        """Block until all work queued on any stream of the device is done."""


class DeviceStreams:
    """The streams of one GPU. Several threads may compute in turn, each on its own stream."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Copies to and from the host need few multiprocessors, and layers wait for them.
        self._swaps = runtime.new_stream(urgent=True)
        # The pools and scales are made on the stream of the thread that constructs this.
        self._compute = runtime.current_stream()
        self._swaps_are_ahead = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        with device_errors():
            stream = self._runtime.current_stream()
            if stream != self._compute:
                self._runtime.order(self._compute, stream)
                self._compute = stream
            if self._swaps_are_ahead:
                self._runtime.order(self._swaps, stream)
                self._swaps_are_ahead = False
            yield

    @contextmanager
    def swapping(self) -> Iterator[None]:
        with device_errors():
            self._runtime.order(self._compute, self._swaps)
            self._swaps_are_ahead = True
            with self._runtime.on(self._swaps):
                yield

    def finish(self) -> None:
        # The compute stream then waits for the swaps, so waiting for it is enough.
        with self.computing():
            self._runtime.wait(self._compute)

    def finish_swaps(self) -> None:
        with device_errors():
            self._runtime.wait(self._swaps)

    def drain(self) -> None:
        with device_errors():
            self._runtime.wait_for_all()

    def use_own_stream(self) -> None:
        self._runtime.set_stream(self._runtime.new_stream())


class CudaRuntime:
    """Torch's stream operations for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self, *, urgent: bool = False) -> torch.cuda.Stream:
        priority = -1 if urgent else 0
        stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self._device, priority=priority
        )
        return stream

    def set_stream(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def order(self, before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        after.wait_stream(before)

    def wait(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self._device)
