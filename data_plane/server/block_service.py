"""Whole blocks: read, written, and loaded from files."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio
import numpy as np

from data_plane.execution import opaque_pages
from data_plane.execution.executor import Executor
from data_plane.execution.plan_runner import StartedPlan
from data_plane.execution.table_blocks import BlockRange
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.server.calls import Calls, refuse_fields
from data_plane.server.fair_queue import Lane
from data_plane.server.file_tier import FileTier
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from data_plane.tier_keys import tier_key_of
from kvplane.errors import InvalidRequestError, LayoutMismatchError
from kvplane.serving.callers.identity import payer
from kvplane.v1 import execution_pb2 as contract
from kvplane.wire import columns
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc
from kvplane.wire.v1 import types_pb2 as tpb

BLOCKS: Final = contract.DESCRIPTOR.services_by_name["BlockService"]
# Upper bounds on a response's size without its tensor: in all, and for each block.
_OVERHEAD_BYTES: Final = 1024
_BLOCK_REF_BYTES: Final = 12
_LATER: Final = "is for a later release: this one does not serve it"
_OPAQUE_ALONE: Final = "is for pools of opaque pages alone"

_Context = grpc.aio.ServicerContext[Any, Any]


class BlockService(execution_pb2_grpc.BlockServiceServicer):
    """The gRPC service that reads, writes and loads whole blocks of one executor."""

    def __init__(
        self, calls: Calls, executor: Executor, *, max_message_bytes: int, files: FileTier | None
    ) -> None:
        """``files``: the file tier; None where blocks are not kept in files."""
        self._calls = calls
        self._executor = executor
        self._max_message_bytes = max_message_bytes
        self._files = files
        (group, *_) = executor.layout.groups
        self._page_bytes = group.page_bytes
        """Bytes of an opaque page; 0 in a pool of keys and values."""

    async def ReadBlocks(
        self, request: pb.ReadBlocksRequest, context: _Context
    ) -> pb.ReadBlocksResponse:
        refuse_fields(request, ("pin_grant", "output"), _LATER)
        if not self._page_bytes:
            refuse_fields(request, ("keys",), _OPAQUE_ALONE)
        entries = columns.read(columns.INT32, request.entries, "entries")
        self._check_answer_fits(request, len(entries))
        tenant = self._calls.tenant()

        def command() -> pb.ReadBlocksResponse:
            session_id = self._executor.open(request.grant, tenant=tenant)
            layers = request.group, request.first_layer, request.num_layers
            place = BlockRange(request.sequence_id, 0, len(entries), *layers)
            blocks, table = self._executor.blocks.read(session_id, place, entries)
            num_bytes: list[int] = []
            if self._page_bytes:
                with device_errors():
                    blocks, num_bytes = opaque_pages.unpack(blocks, request.keys)
            return pb.ReadBlocksResponse(
                blocks=tensor_to_message(blocks),
                table=table,
                num_bytes=columns.pack(columns.INT32, num_bytes),
                layout_fingerprint=self._executor.layout.fingerprint,
            )

        return await self._calls.run(command)

    async def WriteBlocks(
        self, request: pb.WriteBlocksRequest, context: _Context
    ) -> pb.WriteBlocksResponse:
        if not self._page_bytes:
            refuse_fields(request, ("num_bytes", "keys"), _OPAQUE_ALONE)
        if request.layout_fingerprint not in (b"", self._executor.layout.fingerprint):
            raise LayoutMismatchError(
                "the blocks were read in a pool whose layout differs from this pool's",
                field="layout_fingerprint",
            )
        sequence_id, entries = _span_of(request)
        num_bytes = columns.read(columns.INT32, request.num_bytes, "num_bytes")
        if len(num_bytes) not in (0, len(entries)):
            raise InvalidRequestError(
                f"must be one for each of {len(entries)} entries", field="num_bytes"
            )
        tenant = self._calls.tenant()

        def command() -> pb.WriteBlocksResponse:
            blocks = tensor_from_message(request.blocks, self._executor.device, field="blocks")
            if blocks.dim() > 1 and blocks.shape[1] != len(entries):
                raise InvalidRequestError(
                    f"must hold {len(entries)} blocks, one for each entry", field="blocks.shape"
                )
            if self._page_bytes:
                with device_errors():
                    blocks = opaque_pages.pack(blocks, self._page_bytes, num_bytes, request.keys)
            session_id = self._executor.open(request.grant, tenant=tenant)
            number = self._executor.start(session_id, request.plan).number
            layers = request.group, request.first_layer, request.num_layers
            place = BlockRange(sequence_id, entries.start, len(entries), *layers)
            receipt = self._executor.blocks.write(session_id, place, blocks, number)
            return pb.WriteBlocksResponse(receipt=receipt)

        return await self._calls.run(command)

    async def LoadFileBlocks(
        self, request: pb.LoadFileBlocksRequest, context: _Context
    ) -> pb.LoadFileBlocksResponse:
        files, tenant = self._file_tier(), self._calls.tenant()
        if not request.HasField("plan") and request.sequence_id:
            raise InvalidRequestError("must be 0 without a plan", field="sequence_id")

        def command() -> tuple[int, StartedPlan | None]:
            session_id = self._executor.open(request.grant, tenant=tenant)
            if not request.HasField("plan"):
                return session_id, None
            return session_id, self._executor.start(session_id, request.plan)

        session_id, started = await self._calls.run(command)
        if started is None:
            num_blocks = await files.find(session_id, request.token_ids)
            return pb.LoadFileBlocksResponse(num_blocks=num_blocks)
        if started.receipt is not None:
            return pb.LoadFileBlocksResponse(receipt=started.receipt)
        return await files.load(session_id, started.number, request, Lane(payer(), session_id))

    def _file_tier(self) -> FileTier:
        if self._files is None:
            raise InvalidRequestError(
                "this data plane keeps no blocks in files: start it with --file-tier-dir"
            )
        return self._files

    def _check_answer_fits(self, request: pb.ReadBlocksRequest, num_blocks: int) -> None:
        group = request.group if 0 < request.group < len(self._executor.layout.groups) else 0
        pool = self._executor.pools.tier(tier_key_of(group, tpb.TIER_DEVICE))
        num_layers = request.num_layers if 0 < request.num_layers < pool.shape[1] else pool.shape[1]
        block_bytes = pool[0, 0].nbytes * num_layers + _BLOCK_REF_BYTES
        most = (self._max_message_bytes - _OVERHEAD_BYTES) // block_bytes
        if num_blocks > most:
            raise InvalidRequestError(
                f"a message has room for {most} blocks of {num_layers} layers: read fewer blocks "
                "or layers at a time",
                field="entries",
            )


def _span_of(request: pb.WriteBlocksRequest) -> tuple[int, range]:
    """Return the sequence that a request writes to, and its table entries. Raises
    InvalidRequestError for several sequences, and for entries that do not follow each other.
    """
    entries = np.asarray(columns.read(columns.INT32, request.entries, "entries"))
    if not len(entries):
        raise InvalidRequestError("must have at least one entry", field="entries")
    sequence_ids = np.asarray(
        columns.read(columns.INT64, request.sequence_ids, "sequence_ids", length=len(entries))
    )
    others = np.flatnonzero(sequence_ids != sequence_ids[0])
    if len(others):
        raise InvalidRequestError(
            "must be the same for all entries: a call writes one sequence",
            field=f"sequence_ids[{others[0]}]",
        )
    first = int(entries[0])
    apart = np.flatnonzero(entries != first + np.arange(len(entries)))
    if len(apart):
        raise InvalidRequestError(
            f"must be {first + apart[0]}, the entry after the one before",
            field=f"entries[{apart[0]}]",
        )
    return int(sequence_ids[0]), range(first, first + len(entries))
