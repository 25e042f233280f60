"""Calls the kernels on the pools for a plan that was verified, and counts what they did."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data_plane.counters import ExecutorCounters
from data_plane.kernels.backend import KernelSet
from data_plane.kernels.checks import check_tensor, require
from data_plane.kernels.scales import layer_scales
from data_plane.memory.pool import TORCH_DTYPES, Pools
from data_plane.plans.attention_batch import Rows
from data_plane.plans.transfers import Batch
from data_plane.shard import Shard, only_group
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.layout import Layout
from kvplane.v1 import types_pb2 as pb

# Numbers of an element's size, to copy elements of any type as they are.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_DIRECTIONS = {
    (pb.TIER_DEVICE, pb.TIER_DEVICE): "copy",
    (pb.TIER_DEVICE, pb.TIER_HOST): "swap_out",
    (pb.TIER_HOST, pb.TIER_DEVICE): "swap_in",
}


class Compute:
    """The kernels of one shard. Layers are named by their index in the shard."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        pools: Pools,
        counters: ExecutorCounters,
        *,
        device: torch.device,
        kernels: KernelSet,
    ) -> None:
        self._group = only_group(layout)
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._num_kv_heads = shard.num_kv_heads
        self._block_size_tokens = layout.block_size_tokens
        self._pools = pools
        self._counters = counters
        self._device = device
        self._kernels = kernels
        self._streams = kernels.streams
        self._scales = layer_scales(layout, shard, device)

    def check_input(self, rows: Rows, key: torch.Tensor, value: torch.Tensor, prefix: str) -> None:
        """Refuse keys and values that are not [num_tokens, num_kv_heads, head_size]."""
        shape = (rows.num_tokens, self._num_kv_heads, self._group.head_size)
        check_tensor(key, shape, self._dtype, self._device, f"{prefix}key")
        check_tensor(value, shape, self._dtype, self._device, f"{prefix}value")

    def check_query(
        self, rows: Rows, query: torch.Tensor, options: AttentionOptions, prefix: str
    ) -> None:
        """Refuse a query that is not [num_tokens, num_heads, head_size], and bad options."""
        num_heads = query.shape[1] if query.dim() == 3 else 0
        shape = (rows.num_tokens, num_heads, self._group.head_size)
        check_tensor(query, shape, self._dtype, self._device, f"{prefix}query")
        require(
            num_heads >= 1 and num_heads % self._num_kv_heads == 0,
            f"must have a multiple of {self._num_kv_heads} heads",
            f"{prefix}query",
        )
        num_slopes = len(options.alibi_slopes)
        require(
            num_slopes in (0, num_heads),
            f"must be none or {num_heads}, one a query head, are {num_slopes}",
            f"{prefix}options.alibi_slopes",
        )

    def transfer(self, batch: Batch) -> None:
        """Start copies or swaps, to run after all that was given before."""
        direction = _DIRECTIONS[batch.source_tier, batch.destination_tier]
        source = self._pools.tier(batch.source_tier)
        if direction == "copy":
            with self._streams.computing():
                self._kernels.copy_blocks(source, batch.pairs)
        else:
            destination = self._pools.tier(batch.destination_tier)
            with self._streams.swapping():
                self._kernels.swap_blocks(source, destination, batch.pairs)
        num_blocks = len(batch.pairs)
        self._counters.num_transferred_blocks[direction] += num_blocks
        self._counters.transfer_bytes[direction] += num_blocks * source[0].nbytes

    def prepare(self, rows: Rows) -> Rows:
        """The rows with their tensors where the kernels read them."""
        with self._streams.computing():
            return rows.to(self._device)

    def write(self, rows: Rows, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write all rows' keys and values of one layer."""
        key_scales, value_scales = self._scales[layer]
        with self._streams.computing():
            self._kernels.reshape_and_cache(
                key,
                value,
                self._pools.pages(layer),
                rows.slots,
                key_scales=key_scales,
                value_scales=value_scales,
            )
        self._counters.num_written_tokens += rows.num_tokens

    def attend(
        self, rows: Rows, layer: int, query: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend from all rows in one layer. The output has the query's shape and dtype."""
        key_scales, value_scales = self._scales[layer]
        with self._streams.computing():
            output = self._kernels.paged_attention(
                query,
                self._pools.pages(layer),
                rows.block_tables,
                rows.query_starts,
                rows.context_lens,
                options=options.in_group(self._group.sliding_window_tokens),
                key_scales=key_scales,
                value_scales=value_scales,
                max_query_len=rows.max_tokens,
            )
        self._counters.num_attention_tokens += rows.num_tokens
        return output

    def read(self, tier: pb.Tier, block_ids: Sequence[int]) -> torch.Tensor:
        """Copy blocks out: [num_layers, n, 2, num_kv_heads, block_size, head_size], where the tier
        is.
        """
        ids = torch.tensor(block_ids, dtype=torch.int64)
        if tier == pb.TIER_HOST:
            self._streams.finish_swaps()
            return self._kernels.gather_host_blocks(self._pools.host_tier, ids)
        with self._streams.computing():
            return self._kernels.gather_blocks(self._pools.device_tier, ids)

    def finish(self) -> None:
        """Wait until all that was given is done. Raises InternalError when the device failed, or a
        kernel met what it could not follow.
        """
        self._streams.finish()
        try:
            with self._streams.computing():
                self._kernels.check_faults()
        except InvalidRequestError as error:
            raise InternalError(f"a kernel stopped: {error}") from error

    def check_blocks(self, rows: Rows, row: int, first_block: int, blocks: torch.Tensor) -> None:
        """Raise InvalidRequestError unless ``blocks``, the table entries from ``first_block`` on as
        ``read`` returns them, cover a row.
        """
        pool = self._pools.device_tier
        num_blocks = blocks.shape[1] if blocks.dim() == 6 else 0
        shape = (pool.shape[1], num_blocks, *pool.shape[2:])
        check_tensor(blocks, shape, pool.dtype, self._device, "blocks")
        first = rows.first_positions[row] - first_block * self._block_size_tokens
        begin, end = rows.spans[row]
        covered = first >= 0 and first + end - begin <= num_blocks * self._block_size_tokens
        require(first_block >= 0 and covered, "do not cover the row", "first_block")

    def write_row(self, rows: Rows, row: int, first_block: int, blocks: torch.Tensor) -> None:
        """Write the slots of one row, all layers, from checked ``blocks``, and no other slot.

        Blocks hold what is stored, so their bits are copied: fp8 is not rounded again.
        """
        block_size = self._block_size_tokens
        begin, end = rows.spans[row]
        first = rows.first_positions[row] - first_block * block_size
        bits = _BITS[blocks.element_size()]
        with self._streams.computing():
            slots = rows.slots[begin:end]
            block_ids, offsets = slots // block_size, slots % block_size
            for layer in range(blocks.shape[0]):
                # [num_blocks, 2, heads, block_size, head_size] -> [tokens, 2, heads, head_size]
                tokens = blocks[layer].view(bits).permute(0, 3, 1, 2, 4).flatten(0, 1)
                pages = self._pools.pages(layer).view(bits)
                pages[block_ids, :, :, offsets] = tokens[first : first + end - begin]
        self._counters.num_written_tokens += (end - begin) * blocks.shape[0]
