"""A data client with the unary methods, which the client itself does not need."""

from __future__ import annotations

from typing import Any

from kvplane import DataClient, Tensor, ops
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc
from kvplane.wire.v1.types_pb2 import SignedPayload


class UnaryClient(DataClient):
    """Returns the messages as they came."""

    def __init__(self, target: str, **settings: Any) -> None:
        super().__init__(target, **settings)
        channel = self._connection.channel
        self._executions_stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        self._blocks_stub = execution_pb2_grpc.BlockServiceStub(channel)

    async def _call(self, method: Any, request: Any) -> Any:
        return await self._connection.call(method, request, None)

    async def reshape_and_cache(
        self,
        grant: SignedPayload,
        plan: SignedPayload,
        layer: int,
        key: Tensor,
        value: Tensor | None,
    ) -> pb.RunLayerResponse:
        """Write one layer's keys and values [num_tokens, num_kv_heads, head_size]; there are no
        values where the layer keeps latents.
        """
        parts = {"key": key.to_proto(), "value": None if value is None else value.to_proto()}
        request = pb.RunLayerRequest(grant=grant, plan=plan, layer=layer, **parts)
        response: pb.RunLayerResponse = await self._call(
            self._executions_stub.ReshapeAndCache, request
        )
        return response

    async def paged_attention(
        self,
        grant: SignedPayload,
        plan: SignedPayload,
        layer: int,
        query: Tensor,
        *,
        options: AttentionOptions = AttentionOptions(),
    ) -> pb.RunLayerResponse:
        """Attend from ``query`` [num_tokens, num_heads, head_size] in a layer that was written."""
        parts = {"query": query.to_proto(), "options": options.to_proto()}
        request = pb.RunLayerRequest(grant=grant, plan=plan, layer=layer, **parts)
        response: pb.RunLayerResponse = await self._call(
            self._executions_stub.PagedAttention, request
        )
        return response

    async def copy_blocks(self, grant: SignedPayload, plan: SignedPayload) -> pb.StartPlanResponse:
        """Start a plan whose transfers are all copies inside the device tier."""
        request = pb.StartPlanRequest(grant=grant, plan=plan)
        response: pb.StartPlanResponse = await self._call(self._executions_stub.CopyBlocks, request)
        return response

    async def swap_blocks(self, grant: SignedPayload, plan: SignedPayload) -> pb.StartPlanResponse:
        """Start a plan whose transfers are all swaps between the tiers."""
        request = pb.StartPlanRequest(grant=grant, plan=plan)
        response: pb.StartPlanResponse = await self._call(self._executions_stub.SwapBlocks, request)
        return response

    async def read_blocks(
        self,
        grant: SignedPayload,
        sequence_id: int,
        *,
        first_block: int = 0,
        num_blocks: int = 1,
        group: int = 0,
    ) -> pb.ReadBlocksResponse:
        """Read table entries [first_block, first_block + num_blocks) of a sequence, all layers."""
        entries = _entries(first_block, num_blocks)
        request = pb.ReadBlocksRequest(
            grant=grant, sequence_id=sequence_id, entries=entries, group=group
        )
        response: pb.ReadBlocksResponse = await self._call(self._blocks_stub.ReadBlocks, request)
        return response

    async def write_blocks(
        self, grant: SignedPayload, plan: SignedPayload, sequence_id: int, blocks: Tensor
    ) -> pb.WriteBlocksResponse:
        """Write the slots of the plan's span for a sequence from whole blocks, the table's first
        ones, as ``read_blocks`` returns them.
        """
        num_blocks = blocks.shape[1]
        request = pb.WriteBlocksRequest(
            grant=grant,
            plan=plan,
            sequence_ids=columns.pack(columns.INT64, [sequence_id] * num_blocks),
            entries=_entries(0, num_blocks),
            blocks=blocks.to_proto(),
        )
        response: pb.WriteBlocksResponse = await self._call(self._blocks_stub.WriteBlocks, request)
        return response

    async def load_file_blocks(
        self, grant: SignedPayload, plan: SignedPayload, sequence_id: int, tokens: ops.Tokens
    ) -> pb.LoadFileBlocksResponse:
        """Start a plan, and write its span for a sequence from files. ``tokens``: the sequence's,
        to the span's end. The answer has no receipt when a file could not be used.
        """
        request = pb.LoadFileBlocksRequest(
            grant=grant, plan=plan, sequence_id=sequence_id, token_ids=ops.pack_tokens(tokens)
        )
        response: pb.LoadFileBlocksResponse = await self._call(
            self._blocks_stub.LoadFileBlocks, request
        )
        return response


def _entries(first_block: int, num_blocks: int) -> bytes:
    try:
        return columns.pack(columns.INT32, range(first_block, first_block + num_blocks))
    except OverflowError as error:
        raise InvalidRequestError("must be an int32", field="entries") from error
