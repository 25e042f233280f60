"""A client of a data plane."""

from __future__ import annotations

import weakref
from types import TracebackType

from kvplane import ops
from kvplane.attention_options import AttentionOptions
from kvplane.clients.execution import Execution
from kvplane.clients.server_info import get_server_info
from kvplane.tensor import Tensor
from kvplane.transport.connection import Connection
from kvplane.transport.tls import Tls
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc, pool_pb2
from kvplane.wire.v1.types_pb2 import SignedPayload


class DataClient:
    """Calls a data plane at ``target`` ("host:port").

    ``timeout_s``: default deadline of each call. ``shared_memory``: whether executions use memory
    that a data plane on this machine shares, if it does; otherwise their tensors travel over gRPC.
    Every call may be repeated, and is while the plane is UNAVAILABLE. Errors raised are those of
    ``kvplane.errors``: BadSignatureError, StaleError, ConflictError for payloads that do not fit,
    InvalidRequestError naming the field.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        self._shared_memory = shared_memory
        self._executions: weakref.WeakSet[Execution] = weakref.WeakSet()
        self._connection = Connection(target, tls=tls, timeout_s=timeout_s)
        self._stub = execution_pb2_grpc.ExecutionServiceStub(self._connection.channel)
        self._blocks = execution_pb2_grpc.BlockServiceStub(self._connection.channel)

    async def __aenter__(self) -> DataClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def get_server_info(
        self, *, timeout_s: float | None = None
    ) -> pool_pb2.GetServerInfoResponse:
        """Get the release of the data plane, its part of a pool, its device, and the control plane
        that it is registered with.
        """
        return await get_server_info(self._connection, timeout_s)

    async def open(self, grant: SignedPayload, *, timeout_s: float | None = None) -> Execution:
        """Open an execution, which runs the plans of the session of ``grant``."""
        execution = Execution(self._connection, self._stub, grant, local=self._shared_memory)
        self._executions.add(execution)
        await execution.connect(timeout_s=timeout_s)
        return execution

    async def reshape_and_cache(
        self,
        grant: SignedPayload,
        plan: SignedPayload,
        layer: int,
        key: Tensor,
        value: Tensor | None,
        *,
        timeout_s: float | None = None,
    ) -> pb.ReshapeAndCacheResponse:
        """Write one layer's keys and values [num_tokens, num_kv_heads, head_size]; values may have
        a size of their own, and there are none where the layer keeps latents.
        """
        request = pb.ReshapeAndCacheRequest(
            grant=grant,
            plan=plan,
            layer=layer,
            key=key.to_proto(),
            value=None if value is None else value.to_proto(),
        )
        response: pb.ReshapeAndCacheResponse = await self._connection.call(
            self._stub.ReshapeAndCache, request, timeout_s
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
    ) -> pb.PagedAttentionResponse:
        """Attend from ``query`` [num_tokens, num_heads, head_size] in a layer that was written.
        Returns [num_tokens, num_heads, value_head_size].
        """
        request = pb.PagedAttentionRequest(
            grant=grant,
            plan=plan,
            layer=layer,
            query=query.to_proto(),
            options=options.to_proto(),
        )
        response: pb.PagedAttentionResponse = await self._connection.call(
            self._stub.PagedAttention, request, timeout_s
        )
        return response

    async def copy_blocks(
        self, grant: SignedPayload, plan: SignedPayload, *, timeout_s: float | None = None
    ) -> pb.CopyBlocksResponse:
        """Start a plan whose transfers are all copies inside the device tier."""
        request = pb.CopyBlocksRequest(grant=grant, plan=plan)
        response: pb.CopyBlocksResponse = await self._connection.call(
            self._stub.CopyBlocks, request, timeout_s
        )
        return response

    async def swap_blocks(
        self, grant: SignedPayload, plan: SignedPayload, *, timeout_s: float | None = None
    ) -> pb.SwapBlocksResponse:
        """Start a plan whose transfers are all swaps between the tiers."""
        request = pb.SwapBlocksRequest(grant=grant, plan=plan)
        response: pb.SwapBlocksResponse = await self._connection.call(
            self._stub.SwapBlocks, request, timeout_s
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
            first_block=first_block,
            num_blocks=num_blocks,
            group=group,
            first_layer=first_layer,
            num_layers=num_layers,
        )
        response: pb.ReadBlocksResponse = await self._connection.call(
            self._blocks.ReadBlocks, request, timeout_s
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
        source: pb.BlockSource | None = None,
        timeout_s: float | None = None,
    ) -> pb.WriteBlocksResponse:
        """Write the slots of the plan's span for a sequence.

        ``blocks``: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_size] of kv_dtype, or
        as ``read_blocks`` returned them. ``first_layer``, ``num_layers``: as of ``read_blocks``.
        ``source``: as ``read_blocks`` returned it, None if unknown. Raises LayoutMismatchError when
        its layout is another.
        """
        request = pb.WriteBlocksRequest(
            grant=grant,
            plan=plan,
            sequence_id=sequence_id,
            first_block=first_block,
            blocks=blocks.to_proto(),
            group=group,
            first_layer=first_layer,
            num_layers=num_layers,
            source=source,
        )
        response: pb.WriteBlocksResponse = await self._connection.call(
            self._blocks.WriteBlocks, request, timeout_s
        )
        return response

    async def find_file_blocks(
        self, grant: SignedPayload, tokens: ops.Tokens, *, timeout_s: float | None = None
    ) -> int:
        """Count the leading full blocks of a prompt that this shard has in files."""
        request = pb.FindFileBlocksRequest(grant=grant, token_ids=ops.pack_tokens(tokens))
        response: pb.FindFileBlocksResponse = await self._connection.call(
            self._blocks.FindFileBlocks, request, timeout_s
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
            self._blocks.LoadFileBlocks, request, timeout_s
        )
        return response

    async def close(self) -> None:
        """Ends every call and execution."""
        for execution in self._executions:
            execution.leave()
        await self._connection.close()
