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

    async def reshape_and_cache(
        self,
        grant: SignedPayload,
        plan: SignedPayload,
        layer: int,
        key: Tensor,
        value: Tensor | None,
        *,
        timeout_s: float | None = None,
    ) -> pb.RunLayerResponse:
        """Write one layer's keys and values [num_tokens, num_kv_heads, head_size]; values may have
        a size of their own, and there are none where the layer keeps latents.
        """
        request = pb.RunLayerRequest(
            grant=grant,
            plan=plan,
            layer=layer,
            key=key.to_proto(),
            value=None if value is None else value.to_proto(),
        )
        response: pb.RunLayerResponse = await self._connection.call(
            self._executions_stub.ReshapeAndCache, request, timeout_s
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
        timeout_s: float | None = None,
    ) -> pb.RunLayerResponse:
        """Attend from ``query`` [num_tokens, num_heads, head_size] in a layer that was written.
        Returns [num_tokens, num_heads, value_head_size].
        """
        request = pb.RunLayerRequest(
            grant=grant,
            plan=plan,
            layer=layer,
            query=query.to_proto(),
            options=options.to_proto(),
        )
        response: pb.RunLayerResponse = await self._connection.call(
            self._executions_stub.PagedAttention, request, timeout_s
        )
        return response

    async def copy_blocks(
        self, grant: SignedPayload, plan: SignedPayload, *, timeout_s: float | None = None
    ) -> pb.StartPlanResponse:
        """Start a plan whose transfers are all copies inside the device tier."""
        request = pb.StartPlanRequest(grant=grant, plan=plan)
        response: pb.StartPlanResponse = await self._connection.call(
            self._executions_stub.CopyBlocks, request, timeout_s
        )
        return response

    async def swap_blocks(
        self, grant: SignedPayload, plan: SignedPayload, *, timeout_s: float | None = None
    ) -> pb.StartPlanResponse:
        """Start a plan whose transfers are all swaps between the tiers."""
        request = pb.StartPlanRequest(grant=grant, plan=plan)
        response: pb.StartPlanResponse = await self._connection.call(
            self._executions_stub.SwapBlocks, request, timeout_s
        )
        return response

    async def read_blocks(
        self,
        grant: SignedPayload,
        sequence_id: int,
        *,
        first_block: int = 0,
        num_blocks: int = 1,
        group: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        timeout_s: float | None = None,
    ) -> pb.ReadBlocksResponse:
        """Read table entries [first_block, first_block + num_blocks) of a sequence.

        ``num_layers``: layers read, from the model's layer ``first_layer`` on; 0 means all that the
        shard holds. Raises SequenceNotFoundError, and BlockNotWrittenError for an entry in which
        nothing was written.
        """
        request = pb.ReadBlocksRequest(
            grant=grant,
            sequence_id=sequence_id,
            entries=_entries(first_block, num_blocks),
            group=group,
            first_layer=first_layer,
            num_layers=num_layers,
        )
        response: pb.ReadBlocksResponse = await self._connection.call(
            self._blocks_stub.ReadBlocks, request, timeout_s
        )
        return response

    async def write_blocks(
        self,
        grant: SignedPayload,
        plan: SignedPayload,
        sequence_id: int,
        blocks: Tensor,
        *,
        first_block: int = 0,
        group: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        layout_fingerprint: bytes = b"",
        timeout_s: float | None = None,
    ) -> pb.WriteBlocksResponse:
        """Write the slots of the plan's span for a sequence.

        ``blocks``: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_size] of kv_dtype, or
        as ``read_blocks`` returned them. ``first_layer``, ``num_layers``: as of ``read_blocks``.
        ``layout_fingerprint``: as ``read_blocks`` returned it, empty if unknown. Raises
        LayoutMismatchError when it is not the pool's.
        """
        num_blocks = blocks.shape[1] if len(blocks.shape) > 1 else 1
        request = pb.WriteBlocksRequest(
            grant=grant,
            plan=plan,
            sequence_ids=columns.pack(columns.INT64, [sequence_id] * num_blocks),
            entries=_entries(first_block, num_blocks),
            blocks=blocks.to_proto(),
            group=group,
            first_layer=first_layer,
            num_layers=num_layers,
            layout_fingerprint=layout_fingerprint,
        )
        response: pb.WriteBlocksResponse = await self._connection.call(
            self._blocks_stub.WriteBlocks, request, timeout_s
        )
        return response

    async def find_file_blocks(
        self, grant: SignedPayload, tokens: ops.Tokens, *, timeout_s: float | None = None
    ) -> int:
        """Count the leading full blocks of a prompt that this shard has in files."""
        request = pb.LoadFileBlocksRequest(grant=grant, token_ids=ops.pack_tokens(tokens))
        response: pb.LoadFileBlocksResponse = await self._connection.call(
            self._blocks_stub.LoadFileBlocks, request, timeout_s
        )
        return response.num_blocks

    async def load_file_blocks(
        self,
        grant: SignedPayload,
        plan: SignedPayload,
        sequence_id: int,
        tokens: ops.Tokens,
        *,
        timeout_s: float | None = None,
    ) -> pb.LoadFileBlocksResponse:
        """Start a plan, and write its span for a sequence from files. ``tokens``: the sequence's,
        to the span's end. The answer has no receipt when a file could not be used.
        """
        request = pb.LoadFileBlocksRequest(
            grant=grant, plan=plan, sequence_id=sequence_id, token_ids=ops.pack_tokens(tokens)
        )
        response: pb.LoadFileBlocksResponse = await self._connection.call(
            self._blocks_stub.LoadFileBlocks, request, timeout_s
        )
        return response


def _entries(first_block: int, num_blocks: int) -> bytes:
    try:
        return columns.pack(columns.INT32, range(first_block, first_block + num_blocks))
    except OverflowError as error:
        raise InvalidRequestError("must be an int32", field="entries") from error
