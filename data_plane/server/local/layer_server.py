"""Serves the bound layers of one client: native code takes their packets, runs them and answers.

It returns everything else to its caller: other packets, a plan's last layer, whose answer has the
receipt, and refusals. ``PlanRunner.check_may_run`` is asked before layers are served, at least once
a millisecond; no other command runs in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvplane_kernels import ServedLayers

from data_plane.execution.executor import Executor
from data_plane.execution.layer_runner import RanLayer
from data_plane.execution.plan_runner import PlanLayer
from data_plane.kernels.arguments import require
from data_plane.kernels.backends.bound_layers import BoundLayer
from data_plane.server.execute_stream import ExecuteStream, Layer
from data_plane.server.local.region import overlap
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.slices import Slices
from kvplane.transport.local import packets
from kvplane.wire.twin import whole
from kvplane.wire.v1 import execution_pb2 as pb

_MOST_S: Final = 0.001
"""Longest time in seconds under the executor's lock between two checks of layers."""

_MAX_BYTES: Final = 4096
"""Maximum bytes of a request to bind a layer, since a client chooses how many are kept."""


@dataclass(frozen=True, slots=True)
class _Binding:
    """A layer that a client has bound. ``bound``: for native code; None where Python runs it."""

    layer: Layer
    bound: BoundLayer | None


class LayerServer:
    """Serves the bound layers of one stream. Used on the worker thread."""

    def __init__(
        self, fd: int, stream: ExecuteStream, executor: Executor, *, spin_s: float
    ) -> None:
        """``fd``: of the client's socket. ``spin_s``: how long to poll for a packet."""
        self.num_served = 0
        """Packets that native code has answered."""
        self.busy_s = 0.0
        """Time that their layers took."""
        self._stream = stream
        self._executor = executor
        self._native = ServedLayers(fd=fd, spin_s=spin_s, most_s=_MOST_S)
        self._bindings: dict[int, _Binding] = {}

    def look(self, epoll: int, *, waits: bool) -> bool:
        """Return whether there is a packet for ``serve`` or ``take``. ``waits``: wait for one until
        something else is ready at ``epoll``. Raises OSError when the client has gone.
        """
        return self._native.look(epoll, waits)

    def take(self) -> bytes | None:
        """Return the packet that ``look`` found, for the caller to answer."""
        return self._native.take()

    def serve(self, epoll: int, *, waits: bool) -> bytes | None:
        """Answer the packet that ``look`` found and, if this ``waits``, those that come within a
        millisecond. Stop at one that the caller has to answer, and return it. Raises OSError when
        the client has gone or reads no answers.
        """
        native, stream = self._native, self._stream
        number = native.asks_for_layer(stream.named)
        binding = None if number is None else self._bindings.get(number)
        if binding is not None and binding.bound is not None and stream.begun is not None:

            def serve(batches: Sequence[Any], first: int, end: int, num_threads: int) -> None:
                native.begin(batches, first, end, num_threads, stream.named)
                native.serve(epoll, waits)

            with suppress(KvplaneError):  # the caller's answer to the packet says why
                named = PlanLayer(stream.session_id, binding.layer.index, *stream.begun)
                self._executor.layer_runner.serve(named, serve, self._take_ran)
        return native.take()

    def bind(self, number: int, request: bytes) -> bytes:
        """Bind a layer, in place of an earlier one of this number. Returns the answer. Raises
        KvplaneError; the number is then not bound.
        """
        self._native.unbind(number)
        self._bindings.pop(number, None)
        require(len(request) <= _MAX_BYTES, f"must have at most {_MAX_BYTES} bytes", "layer")
        parsed = whole(packets.parse(pb.RunLayerRequest, request), request)
        if parsed.plan_number or parsed.HasField("pass_index"):
            raise InvalidRequestError(
                "must not be given: each packet of a bound layer names its plan and pass",
                field="layer.plan_number",
            )
        layer, bound = self._stream.bind(parsed)
        binding = self._bindings[number] = _Binding(layer, _served(layer, bound))
        if binding.bound is not None:
            query, key, value, out = layer.query, layer.key, layer.value, layer.output
            assert query is not None and key is not None and value is not None and out is not None
            index = self._executor.layers.index(layer.index)
            self._native.bind(
                binding=number,
                index=index,
                group=self._executor.pools.group_of_layer(index),
                num_tokens=binding.bound.num_tokens,
                layer=binding.bound.native,
                query=query.data_ptr(),
                key=key.data_ptr(),
                value=value.data_ptr(),
                out=out.data_ptr(),
            )
        return packets.head_of(packets.BIND_LAYER, number)

    def run(self, number: int, named: bytes) -> Slices[bytes]:
        """Run a bound layer in Python, and return the answer. Raises KvplaneError."""
        binding = self._bindings.get(number)
        if binding is None:
            raise InvalidRequestError("is not bound: bind the layer first", field="binding")
        layer = binding.layer
        _, receipt = yield from self._stream.run(layer, *packets.read_named(named))
        if receipt is None:
            return packets.head_of(packets.LAYER, number)
        answer = pb.RunLayerResponse(receipt=receipt)
        answer.MergeFrom(layer.answer)
        return pb.ExecuteResponse(output=answer).SerializeToString()

    def forget_in_place(self) -> None:
        """Remove the bindings whose tensors are in a region on the GPU."""
        for number, binding in list(self._bindings.items()):
            if binding.layer.is_in_place:
                self._native.unbind(number)
                del self._bindings[number]

    def close(self) -> None:
        """Remove all bindings, and with them the references to the regions' tensors."""
        self._native.clear()
        self._bindings.clear()

    def _take_ran(self) -> Sequence[RanLayer]:
        ran = self._native.take_ran()
        self.num_served += len(ran)
        self.busy_s += sum(write_s + attention_s for _, write_s, attention_s in ran)
        return [
            RanLayer(self._bindings[number].layer.index, bound, seconds)
            for number, *seconds in ran
            if (bound := self._bindings[number].bound) is not None
        ]


def _served(layer: Layer, bound: BoundLayer | None) -> BoundLayer | None:
    """Return ``bound`` if native code may serve the layer: all its tensors are in regions, and the
    output is apart from the others.
    """
    query, key, value, output = layer.query, layer.key, layer.value, layer.output
    if bound is None or query is None or key is None or value is None or output is None:
        return None
    if output.shape != bound.output_shape:
        return None
    return None if any(overlap(output, tensor) for tensor in (query, key, value)) else bound
