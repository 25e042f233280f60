"""Serves the layers of a client whose plans ask for the same packets one after another, as an
engine's decode steps do: native code compares each packet with the one that comes next, runs what
was bound for it, and answers.

All else is the caller's: other packets, a plan's last layer, whose answer has the receipt, and what
is refused. Before layers are looked for, everything is checked that others may have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from kvplane_kernels import ServedLayers

from data_plane.executor import Executor
from data_plane.expected_layers import BoundCall, ExpectedLayers, LayerCall
from data_plane.server.execute_stream import PIECE_S, ExecuteStream, Layer
from kvplane.errors import KvplaneError

_MOST_S: Final = 0.01
"""For how long layers are looked for and run between two checks."""


class KnownLayers:
    """Of one stream. Used on the worker thread."""

    def __init__(
        self, fd: int, stream: ExecuteStream, executor: Executor, *, spin_s: float
    ) -> None:
        """``fd``: of the client's socket. ``spin_s``: how long to look for a packet."""
        self.num_served = 0
        """Packets that were answered here."""
        self.busy_s = 0.0
        """What their layers took."""
        self._stream = stream
        self._expectations = executor.expectations
        self._native = ServedLayers(fd=fd, spin_s=spin_s, most_s=_MOST_S)
        self._calls: Sequence[Layer] = ()  # that the native object has
        self._bound: list[BoundCall] | None = None
        self._plan: tuple[int, int] | None = None
        self._num_starts = 0
        self._expected: ExpectedLayers | None = None  # of that plan

    def serve(self, epoll: int, *, waits: bool) -> bytes | None:
        """Answer packets until there is none, or one to be answered by the caller, which is
        returned. ``waits``: look for a while, until something else is ready at ``epoll``. Raises
        OSError when the client went away or takes no answers.
        """
        native, stream = self._native, self._stream
        expected = self._find()
        if expected is None:
            native.end()
            return native.serve(epoll, waits)
        first = stream.num_ran
        native.begin(expected.batches, first, expected.num_threads)
        serve = partial(native.serve, epoll, waits)
        try:
            return self._expectations.run(expected, first, serve, self._take_times)
        except KvplaneError:
            self._expected = None
            native.end()
            return native.serve(epoll, waits)

    def close(self) -> None:
        """Forget the region's tensors."""
        self._native.clear()
        self._calls, self._bound, self._expected = (), None, None

    def _take_times(self) -> Sequence[tuple[float, float]]:
        times = self._native.take_times()
        self._stream.note_ran(len(times))
        self.num_served += len(times)
        self.busy_s += sum(map(sum, times))
        return times

    def _find(self) -> ExpectedLayers | None:
        """What may come now."""
        stream = self._stream
        if stream.plan != self._plan or stream.num_starts != self._num_starts:
            self._plan, self._num_starts = stream.plan, stream.num_starts
            try:
                self._expected = self._expect()
            except KvplaneError:
                self._expected = None
        return self._expected if stream.is_usual else None

    def _expect(self) -> ExpectedLayers | None:
        """For a plan that was started."""
        stream = self._stream
        if self._plan is None:
            return None
        usual = stream.usual[:-1]
        if self._calls is not stream.usual:
            self._calls = stream.usual
            self._bind(usual)
        if self._bound is None:
            return None
        expected = self._expectations.expect(*self._plan, self._bound, PIECE_S)
        if expected is not None:  # all at once; a client that sends fewer has paid for more
            stream.take_bytes(sum(layer.num_shared_bytes for layer in usual[stream.num_ran :]))
        return expected

    def _bind(self, usual: Sequence[Layer]) -> None:
        self._native.clear()
        self._bound = None
        calls = [call for layer in usual if (call := _call(layer)) is not None]
        if not calls or len(calls) != len(usual) or self._plan is None:
            return
        self._bound = self._expectations.bind(*self._plan, calls)
        for layer, call, bound in zip(usual, calls, self._bound or (), strict=False):
            self._native.add(
                packet=layer.request,
                answer=layer.packet,
                layer=bound.bound.native,
                query=call.query.data_ptr(),
                key=call.key.data_ptr(),
                value=call.value.data_ptr(),
                out=call.output.data_ptr(),
            )


def _call(layer: Layer) -> LayerCall | None:
    """A layer whose tensors are all in the region, its output apart from the others."""
    query, key, value, output = layer.query, layer.key, layer.value, layer.output
    if not layer.request or query is None or value is None or output is None:
        return None
    if any(_overlap(output, tensor) for tensor in (query, key, value)):
        return None
    return LayerCall(layer.index, query, key, value, output, layer.options)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
