"""Requests that read and write whole blocks, from messages to the executor and back: of unary
calls, of Execute streams and of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.execution.executor import Executor
from data_plane.execution.table_blocks import BlockRange
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.server.calls import refuse_fields
from data_plane.server.local.region import Region
from data_plane.server.tensor_codec import data_of, tensor_from_message, without_data
from data_plane.tier_keys import tier_key_of
from kvplane.errors import InvalidRequestError, LayoutMismatchError
from kvplane.wire import bulk, columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.protocol import MAX_MESSAGE_BYTES
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb

T = TypeVar("T")

# Upper bounds on a response's size without its tensor: in all, and for each block.
_OVERHEAD_BYTES: Final = 1024
_BLOCK_REF_BYTES: Final = 16
_BLOCKS: Final = pb.ReadBlocksResponse.BLOCKS_FIELD_NUMBER
_DATA: Final = tpb.Tensor.DATA_FIELD_NUMBER
_OPAQUE_ALONE: Final = "is for pools of opaque pages alone"

Shared = Callable[[tpb.MemoryRange, str], Region]
"""Returns the region that a message refers to. Raises InvalidRequestError naming the field."""


class BlockRequests:
    """Runs requests for blocks on one executor, for a session that is open there. Used on the
    worker thread.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        (group, *_) = executor.layout.groups
        self._fingerprint = executor.layout.fingerprint
        self._page_bytes = group.page_bytes
        """Bytes of an opaque page; 0 in a pool of keys and values."""

    def read(
        self,
        session_id: int,
        request: pb.ReadBlocksRequest,
        shared: Shared,
        finish: Callable[[pb.ReadBlocksResponse, Sequence[bytes | memoryview]], T],
    ) -> T:
        """Read blocks of a table or of pins. Raises as ``Executor.read_blocks``.

        Returns what ``finish`` makes of the answer and of its tensor's data, which the answer
        lacks and which may be memory of the pool: it is good for that call. There is none where the
        request has an output.
        """
        if not self._page_bytes:
            refuse_fields(request, ("keys",), _OPAQUE_ALONE)
        entries = columns.read(INT32, request.entries, "entries")
        layers = request.group, request.first_layer, request.num_layers
        place = BlockRange(request.sequence_id, 0, len(entries), *layers)
        pins = None
        if request.HasField("pin_grant"):
            refuse_fields(request, ("sequence_id",), "is for a table: this request reads pins")
            pins = self._executor.open_pins(session_id, request.pin_grant)
        answer = pb.ReadBlocksResponse(layout_fingerprint=self._fingerprint)
        if self._page_bytes:
            shape = 1, len(entries), self._page_bytes
            answer.blocks.CopyFrom(tpb.Tensor(dtype=tpb.ELEMENT_TYPE_UINT8, shape=shape))
            source = session_id if pins is None else pins
            out = self._output(request, len(entries), shared)
            lent = self._executor.blocks.pages(source, place, entries, request.keys)
            with device_errors(), lent as (pages, table):
                answer.num_bytes = columns.pack(INT32, map(len, pages))
                if table is not None:
                    answer.table.CopyFrom(table)
                if out is None:
                    rests = [bytes(self._page_bytes - len(page)) for page in pages]
                    parts = [part for both in zip(pages, rests, strict=True) for part in both]
                    return finish(answer, parts)
                for room, page in zip(out, pages, strict=True):
                    room[: len(page)] = page
                    room[len(page) :] = 0
            answer.blocks.memory.CopyFrom(request.output)
            return finish(answer, ())
        refuse_fields(request, ("output",), _OPAQUE_ALONE)
        self._check_answer_fits(request, len(entries))
        if pins is not None:
            blocks = self._executor.blocks.read_pinned(pins, place, entries)
        else:
            blocks, table = self._executor.blocks.read(session_id, place, entries)
            answer.table.CopyFrom(table)
        answer.blocks.CopyFrom(without_data(blocks))
        return finish(answer, [data_of(blocks)])

    def write(
        self, session_id: int, request: pb.WriteBlocksRequest, shared: Shared
    ) -> pb.WriteBlocksResponse:
        """Start the request's plan and write blocks of it. Raises as ``Executor.start`` and
        ``Executor.write_blocks``.
        """
        executor = self._executor
        if not self._page_bytes:
            refuse_fields(request, ("num_bytes", "keys"), _OPAQUE_ALONE)
        if request.layout_fingerprint not in (b"", self._fingerprint):
            raise LayoutMismatchError(
                "the blocks were read in a pool whose layout differs from this pool's",
                field="layout_fingerprint",
            )
        places = _ranges_of(request)
        num_entries = sum(place.num_blocks for place in places)
        num_bytes = columns.read(INT32, request.num_bytes, "num_bytes")
        if len(num_bytes) not in (0, num_entries):
            raise InvalidRequestError(
                f"must be one for each of {num_entries} entries", field="num_bytes"
            )
        if request.blocks.HasField("memory"):
            blocks = _in_main_memory(request.blocks.memory, "blocks.memory", shared).tensor(
                request.blocks, "blocks"
            )
        else:
            device = torch.device("cpu") if self._page_bytes else executor.device
            blocks = tensor_from_message(request.blocks, device, field="blocks")
        if blocks.dim() > 1 and blocks.shape[1] != num_entries:
            raise InvalidRequestError(
                f"must hold {num_entries} blocks, one for each entry", field="blocks.shape"
            )
        number = executor.start(session_id, request.plan).number
        if self._page_bytes:
            with device_errors():
                receipt = executor.blocks.write_pages(
                    session_id, places, blocks, num_bytes, request.keys, number
                )
        else:
            receipt = executor.blocks.write(session_id, places, blocks, number)
        return pb.WriteBlocksResponse(receipt=receipt)

    def _output(
        self, request: pb.ReadBlocksRequest, num_blocks: int, shared: Shared
    ) -> NDArray[np.uint8] | None:
        """Return the range that the request's pages go to; None for those of an answer."""
        if not request.HasField("output"):
            self._check_answer_fits(request, num_blocks)
            return None
        region = _in_main_memory(request.output, "output", shared)
        shape = num_blocks, self._page_bytes
        return region.view(request.output, torch.uint8, shape, "output").numpy()

    def _check_answer_fits(self, request: pb.ReadBlocksRequest, num_blocks: int) -> None:
        group = request.group if 0 < request.group < len(self._executor.layout.groups) else 0
        pool = self._executor.pools.tier(tier_key_of(group, tpb.TIER_DEVICE))
        num_layers = request.num_layers if 0 < request.num_layers < pool.shape[1] else pool.shape[1]
        block_bytes = pool.stride(1) * pool.element_size() * num_layers + _BLOCK_REF_BYTES
        most = (MAX_MESSAGE_BYTES - _OVERHEAD_BYTES) // block_bytes
        if num_blocks > most:
            raise InvalidRequestError(
                f"a message has room for {most} blocks of {num_layers} layers: read fewer blocks "
                "or layers at a time",
                field="entries",
            )


def encoded(
    answer: pb.ReadBlocksResponse,
    data: Sequence[bytes | memoryview],
    *,
    around: Sequence[tuple[bytes, int]] = (),
) -> bytes:
    """Finish an answer as its encoding, with one copy of the data. ``around``: the levels around
    it, as of ``bulk.encode``.
    """
    if not data:
        return bulk.encode(around, [answer.SerializeToString()])
    tensor = answer.blocks.SerializeToString()
    answer.ClearField("blocks")
    inside = (answer.SerializeToString(), _BLOCKS), (tensor, _DATA)
    return bulk.encode([*around, *inside], data)


def _in_main_memory(place: tpb.MemoryRange, field: str, shared: Shared) -> Region:
    region = shared(place, field)
    if region.is_on_device:
        raise InvalidRequestError("must be in main memory", field=f"{field}.region_id")
    return region


def _ranges_of(request: pb.WriteBlocksRequest) -> list[BlockRange]:
    """Return what a request writes: for each sequence, entries that follow each other. Raises
    InvalidRequestError for others, and for a sequence that comes again after another one.
    """
    entries = np.asarray(columns.read(INT32, request.entries, "entries"), np.int64)
    if not len(entries):
        raise InvalidRequestError("must have at least one entry", field="entries")
    sequence_ids = np.asarray(
        columns.read(INT64, request.sequence_ids, "sequence_ids", length=len(entries))
    )
    is_same = sequence_ids[1:] == sequence_ids[:-1]
    apart = np.flatnonzero(is_same & (entries[1:] != entries[:-1] + 1))
    if len(apart):
        raise InvalidRequestError(
            f"must be {entries[apart[0]] + 1}, the entry after the one before",
            field=f"entries[{apart[0] + 1}]",
        )
    begins = np.flatnonzero(np.concatenate([[True], ~is_same]))
    layers = request.group, request.first_layer, request.num_layers
    places: dict[int, BlockRange] = {}
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(entries)], strict=True):
        sequence_id = int(sequence_ids[begin])
        if sequence_id in places:
            raise InvalidRequestError(
                "came before: the entries of a sequence are side by side",
                field=f"sequence_ids[{begin}]",
            )
        places[sequence_id] = BlockRange(sequence_id, int(entries[begin]), end - begin, *layers)
    return list(places.values())
