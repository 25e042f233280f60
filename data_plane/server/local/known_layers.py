"""Serves the layers of a client whose plans ask for the same packets one after another, as an
engine's decode steps do: native code compares each packet with the expected one, runs the layer
that was bound for it, and answers.

Everything else is returned to the caller: other packets, a plan's last layer, whose answer has the
receipt, and refusals. Everything that other commands may have changed is checked before layers are
served, at least once a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from kvplane_kernels import ServedLayers

from data_plane.execution.executor import Executor
from data_plane.execution.expected_layers import BoundCall, ExpectedLayers, LayerCall
from data_plane.server.execute_stream import SLICE_S, ExecuteStream, Layer
from data_plane.server.local.region import overlap
from kvplane.errors import KvplaneError

_MOST_S: Final = 0.001
"""For how long packets are awaited and layers run under the executor's lock between two checks."""


class KnownLayers:
    """The known layers of one stream. Used on the worker thread."""

    def __init__(
        self, fd: int, stream: ExecuteStream, executor: Executor, *, spin_s: float
    ) -> None:
        """``fd``: of the client's socket. ``spin_s``: how long to poll for a packet."""
        self.num_served = 0
        """Packets that were answered here."""
        self.busy_s = 0.0
        """Time that their layers took."""
        self._stream = stream
        self._expectations = executor.expectations
        self._native = ServedLayers(fd=fd, spin_s=spin_s, most_s=_MOST_S)
        self._usual: Sequence[Layer] = ()
        self._calls: Sequence[LayerCall] = ()  # of those; none where one has to be checked
        self._bound: list[BoundCall] | None = None  # that the native object has
        self._plan: tuple[int, int, int | None] | None = None
        self._expected: ExpectedLayers | None = None  # of that plan, since that start

    def look(self, epoll: int, *, waits: bool) -> bool:
        """Return whether there is a packet for ``serve`` or ``take``. ``waits``: wait for one until
        something else is ready at ``epoll``. Raises OSError when the client has gone.
        """
        self._prepare()
        return self._native.look(epoll, waits)

    def take(self) -> bytes | None:
        """Return the packet that ``look`` found, for the caller to answer."""
        return self._native.take()

    def serve(self, epoll: int, *, waits: bool) -> bytes | None:
        """Answer the packet that ``look`` found and, if this ``waits``, those that come within a
        millisecond. Stop at one that the caller has to answer, and return it. Raises OSError when
        the client has gone or reads no answers.
        """
        native, stream, expected = self._native, self._stream, self._expected
        if expected is not None and stream.is_usual:
            first = stream.num_ran
            native.begin(expected.batches, first, expected.num_threads, stream.tail)
            serve = partial(native.serve, epoll, waits)
            try:
                self._expectations.run(expected, first, serve, self._take_times)
            except KvplaneError:
                self._expected = None
        return native.take()

    def close(self) -> None:
        """Forget the region's tensors."""
        self._native.clear()
        self._usual, self._calls, self._bound, self._expected = (), (), None, None

    def _take_times(self) -> Sequence[tuple[float, float]]:
        times = self._native.take_times()
        self._stream.note_ran(len(times))
        self.num_served += len(times)
        self.busy_s += sum(map(sum, times))
        return times

    def _prepare(self) -> None:
        """Expect the layers of the stream's plan, if a plan started since the last call."""
        stream = self._stream
        if stream.plan != self._plan:
            self._plan = stream.plan
            self._expected = None
            if self._plan is not None:
                with suppress(KvplaneError):
                    self._expected = self._expect(*self._plan)

    def _expect(
        self, session_id: int, plan_number: int, pass_index: int | None
    ) -> ExpectedLayers | None:
        stream = self._stream
        if self._usual is not stream.usual:
            self._usual, self._bound = stream.usual, None
            self._calls = _calls(stream.usual[:-1])
        if self._bound is None and self._calls:  # also where another plan did not allow them
            self._bind(session_id, plan_number)
        if self._bound is None:
            return None
        return self._expectations.expect(session_id, plan_number, pass_index, self._bound, SLICE_S)

    def _bind(self, session_id: int, plan_number: int) -> None:
        self._native.clear()
        self._bound = self._expectations.bind(session_id, plan_number, self._calls)
        layers = zip(self._usual, self._calls, self._bound or (), strict=False)
        for layer, call, bound in layers:
            self._native.add(
                head=layer.request,
                answer=layer.packet,
                layer=bound.bound.native,
                query=call.query.data_ptr(),
                key=call.key.data_ptr(),
                value=call.value.data_ptr(),
                out=call.output.data_ptr(),
            )


def _calls(layers: Sequence[Layer]) -> Sequence[LayerCall]:
    calls = [call for layer in layers if (call := _call(layer)) is not None]
    return calls if len(calls) == len(layers) else ()


def _call(layer: Layer) -> LayerCall | None:
    """Return the layer's call, or None unless all tensors are in regions, the output apart."""
    query, key, value, output = layer.query, layer.key, layer.value, layer.output
    if not layer.request or query is None or key is None or value is None or output is None:
        return None
    if any(overlap(output, tensor) for tensor in (query, key, value)):
        return None
    return LayerCall(layer.index, query, key, value, output, layer.options)
