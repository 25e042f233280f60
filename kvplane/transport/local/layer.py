"""A layer's messages where its tensors are in a region."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvplane.attention_options import AttentionOptions
from kvplane.tensor import Tensor
from kvplane.transport.local import packets
from kvplane.transport.local.connection import LocalConnection
from kvplane.wire.dtypes import dtype_to_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb

try:
    import kvplane_kernels
except ImportError:  # then no connection is native
    kvplane_kernels = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from kvplane_kernels import LayerCall

Shape = tuple[int, ...]


class Room(Protocol):
    """A region in shared memory that a layer's tensors are put into."""

    @property
    def region_id(self) -> int:
        """Id of the region in messages."""

    def place(self, sizes_bytes: Sequence[int]) -> list[int] | None:
        """Return offsets for ranges of these sizes: see ``packets.place``."""


@dataclass(frozen=True, slots=True)
class LocalLayer:
    """A layer whose tensors are in a region, for any plan and pass: the offset and shape of query,
    key, value and output; the first and the last are None without a query.
    """

    request: pb.RunLayerRequest
    """The layer's request, which names no plan."""
    answer: pb.RunLayerResponse
    """The expected answer, without a receipt."""
    binding: int
    """The number by which packets name the layer, once it is bound."""
    dtype: str
    query: tuple[int, Shape] | None
    key: tuple[int, Shape]
    value: tuple[int, Shape]
    output: tuple[int, Shape] | None

    @property
    def bind_packet(self) -> bytes:
        """Return the packet that binds the layer."""
        head = packets.head_of(packets.BIND_LAYER, self.binding)
        return head + self.request.SerializeToString()

    @property
    def head(self) -> bytes:
        """The first part of the packet that runs the bound layer, which is also its answer if there
        is no receipt. ``packets.named`` follows.
        """
        return packets.head_of(packets.LAYER, self.binding)

    def native(self, connection: LocalConnection) -> LayerCall | None:
        """Return the layer for ``LocalConnection.call``, valid while its memory is mapped; None
        without native code or without a query.
        """
        if not connection.is_native or self.query is None or self.output is None:
            return None
        first = ctypes.addressof(ctypes.c_char.from_buffer(connection.memory))

        def at(there: tuple[int, Shape]) -> tuple[int, int]:
            return first + there[0], Tensor.size_bytes(self.dtype, there[1])

        return kvplane_kernels.LayerCall(
            head=self.head,
            query=at(self.query),
            key=at(self.key),
            value=at(self.value),
            output=at(self.output),
        )

    @classmethod
    def make(
        cls,
        room: Room,
        index: int,
        dtype: str,
        query: Shape | None,
        key: Shape,
        value: Shape,
        options: AttentionOptions,
        binding: int = 0,
    ) -> LocalLayer | None:
        """Make a layer for tensors of these shapes. Returns None if they do not fit the region, or
        are wrong for a layer: such a layer goes over gRPC, where it is refused.
        """
        if any(len(shape) != 3 for shape in (query or key, key, value)):
            return None
        shapes = [key, value] if query is None else [key, value, query, (*query[:2], value[2])]
        offsets = room.place([Tensor.size_bytes(dtype, shape) for shape in shapes])
        if offsets is None:
            return None
        key_there, value_there, *rest = zip(offsets, shapes, strict=True)
        request = pb.RunLayerRequest(layer=index, options=options.to_proto())
        answer = pb.RunLayerResponse(layer=index)
        messages = {"key": key_there, "value": value_there}
        query_there = output_there = None
        if rest:
            query_there, output_there = rest
            messages["query"] = query_there
            request.output.region_id = room.region_id
            request.output.offset_bytes = output_there[0]
            answer.output.CopyFrom(_message(dtype, output_there, room.region_id))
        for name, there in messages.items():
            getattr(request, name).CopyFrom(_message(dtype, there, room.region_id))
        if request.ByteSize() + packets.MAX_NAMES_BYTES > packets.MAX_PACKET_BYTES:
            return None
        places = query_there, key_there, value_there, output_there
        return cls(request, answer, binding, dtype, *places)


def _message(dtype: str, there: tuple[int, Shape], region_id: int) -> tpb.Tensor:
    offset_bytes, shape = there
    memory = tpb.MemoryRange(region_id=region_id, offset_bytes=offset_bytes)
    return tpb.Tensor(dtype=dtype_to_wire(dtype), shape=shape, memory=memory)
