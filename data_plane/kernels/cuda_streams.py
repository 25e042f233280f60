"""In which order the work of a device is done: compute on the caller's stream, swaps on their own.

    compute   layers ──┬────────────────────────────┬─► layers, copies, reads
                       │ a swap waits for what was  │ compute waits for swaps when it next
                       ▼ computed before it         │ begins, and not when they are given
    swaps              swaps ───────────────────────┘

Everything that is given here is thus done as if in the order in which it was given, while the
caller's own work on its stream goes on beside the swaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kvplane.errors import InternalError


@contextmanager
def device_errors() -> Iterator[None]:
    """A failed call of the device, or memory that it does not have, as an InternalError."""
    try:
        yield
    except RuntimeError as error:
        raise InternalError(f"the device failed: {error}") from error


class Streams(Protocol):
    """Where calls of kernels go. Used by one thread at a time."""

    def computing(self) -> AbstractContextManager[None]:
        """What is given inside runs on the caller's stream, after all given before."""
        ...

    def swapping(self) -> AbstractContextManager[None]:
        """What is given inside runs on the swaps' stream, after all given before."""
        ...

    def finish(self) -> None:
        """Wait until all that was given is done. Raises InternalError when the device failed."""
        ...

    def finish_swaps(self) -> None:
        """Wait until all swaps are done, so that the host can read what they wrote. Raises
        InternalError when the device failed.
        """
        ...

    def drain(self) -> None:
        """Wait until nothing of any stream touches memory, whichever thread asks. Raises
        InternalError when the device failed.
        """
        ...

    def use_own_stream(self) -> None:
        """Let what the calling thread gives from now on run beside what others give."""
        ...


class HostStreams:
    """Of the CPU, where a call is done when it returns."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    @contextmanager
    def swapping(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Nothing is left."""

    def finish_swaps(self) -> None:
        """Nothing is left."""

    def drain(self) -> None:
        """Nothing is left."""

    def use_own_stream(self) -> None:
        """There is none."""


class Runtime(Protocol):
    """What is asked of a device. A stream is a value that can be compared."""

    def current_stream(self) -> Any:
        """The stream that the calling thread gives work to."""
        ...

    def new_stream(self) -> Any: ...

    def set_stream(self, stream: Any) -> None:
        """Make it the calling thread's."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make it the calling thread's for a while."""
        ...

    def order(self, before: Any, after: Any) -> None:
        """What ``after`` is given from now on waits for what ``before`` has been given so far."""
        ...

    def wait(self, stream: Any) -> None:
        """Return when all that ``stream`` was given is done."""
        ...

    def wait_for_all(self) -> None:
        """Return when all that any stream of the device was given is done."""
        ...


class DeviceStreams:
    """Of one device. Compute may come from several threads, each with a stream of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._swaps = runtime.new_stream()
        # The pools and scales are made on the stream of the thread that begins.
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
        # One that waits for all others is the last to end.
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
    """Torch's streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
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
