"""Calls the kernels on one shard's pools for verified plans, and counts their work.

For metrics it also counts how long the device spends in kernels. On the CPU every call is timed.
On a GPU one call in 16 of each kernel is timed, by two events on its stream, which are read once
the stream has passed them: no thread waits for the device.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.execution.counters import ExecutorCounters
from data_plane.execution.shards.row_slices import SliceSizes
from data_plane.kernels.arguments import (
    AttentionArguments,
    HostLengths,
    NumbersOfHeads,
    WriteArguments,
    bytes_of_token,
    check_blocks,
    numbers_of_heads,
    require,
)
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.bound_layers import BoundLayer, HostLayers, LayerTensors
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.backends.cuda import StepMemory
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.kernels.step_rows import StepRows
from data_plane.memory.pool import TORCH_DTYPES, Pools
from data_plane.plans.batches.attention_batch import AttentionBatch
from data_plane.plans.batches.transfers import Batch
from data_plane.plans.contents.last_tenants import BlocksByTier
from data_plane.plans.sessions import RunningPlan
from data_plane.tier_keys import TierKey, group_of, tier_key_of, tier_of
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.layout import LATENT, Layout
from kvplane.shard import Shard
from kvplane.wire.v1 import types_pb2 as pb

# Integers by size in bytes, to copy elements of any type bit by bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_DIRECTIONS = {
    (pb.TIER_DEVICE, pb.TIER_DEVICE): "copy",
    (pb.TIER_DEVICE, pb.TIER_HOST): "swap_out",
    (pb.TIER_HOST, pb.TIER_DEVICE): "swap_in",
}


_LayerScales = tuple[torch.Tensor | None, torch.Tensor | None]
"""One layer's scales for keys and for values, where the pool stores 8 bits."""


_TIMED_CALLS: Final = 16
_MAX_PENDING: Final = 1024


class ShardKernels:
    """Calls the kernels on the pools of one shard. A layer is given by its index in the shard."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        pools: Pools,
        counters: ExecutorCounters,
        *,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._groups = [pools.group_of_layer(i) for i in range(len(shard.layers(layout)))]
        self._layer_groups = [layout.groups[group] for group in self._groups]
        self._kv_heads = [shard.kv_heads(layout, group) for group in self._groups]
        self._is_copy = shard.copy > 0
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._block_size_tokens = layout.block_size_tokens
        self._pools = pools
        self._counters = counters
        self._device = device
        self._kernels = kernels
        self._host_kernels = CpuKernels(1)
        self._streams = kernels.streams
        self._scales = layer_scales(layout, shard, device)
        self._times = kernel_times(device, counters)
        self.bound = kernels.bound_layers()
        """Layers whose arguments have been checked; None for kernels that bind none."""
        self._slice_sizes = SliceSizes()

    def group_of_layer(self, layer: int) -> int:
        """Return the layer group that the layer is in."""
        return self._groups[layer]

    def write_arguments(
        self,
        batch: StepRows,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor | None,
        prefix: str = "",
    ) -> WriteArguments:
        """Check a layer's tensors and return them as arguments for ``write``. Raises
        InvalidRequestError naming the tensor, after ``prefix``, unless key and value are
        [num_tokens, num_kv_heads, head_size] of the layout's dtype, value with value_head_size, and
        None where the layer keeps latents.
        """
        with _errors_under(prefix):
            pages = self._pools.pages(layer)
            arguments = WriteArguments(key, value, pages, batch.slots, *self._scales[layer])
            self._check_dtype("key", key)
            if value is not None:
                self._check_dtype("value", value)
        return arguments

    def options_of(self, layer: int, options: AttentionOptions) -> AttentionOptions:
        """Return the options with which a layer attends when a caller passes ``options``."""
        group = self._layer_groups[layer]
        return options.in_group(group.sliding_window_tokens, group.block_pattern)

    def numbers_of_heads(
        self, layer: int, options: AttentionOptions, num_heads: int
    ) -> NumbersOfHeads:
        """Return what a layer's ``options``, from ``options_of``, say of each of ``num_heads``."""
        return numbers_of_heads(options, num_heads, self._kv_heads[layer], self._device)

    def attention_arguments(
        self,
        batch: StepRows,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        prefix: str = "",
        of_heads: NumbersOfHeads | None = None,
    ) -> AttentionArguments:
        """Check a layer's query and options and return them as arguments for ``attend``.
        ``of_heads``: as in ``AttentionArguments``. Raises InvalidRequestError naming the argument,
        after ``prefix``, unless the query is [num_tokens, num_heads, head_size] of the layout's
        dtype and the options fit it, and InternalError when the device failed.
        """
        key_scales, value_scales = self._scales[layer]
        options = self.options_of(layer, options)
        with device_errors(), _errors_under(prefix):
            check_window(options.sliding_window_tokens, batch.max_window_tokens)
            self._check_pattern(options)
            arguments = AttentionArguments(
                query,
                self._pools.pages(layer),
                batch.block_tables,
                batch.query_starts,
                batch.context_lens,
                options,
                key_scales,
                value_scales,
                batch.max_tokens,
                batch.lengths,
                batch.plans,
                batch.is_padded,
                of_heads,
                self._kv_heads[layer].start,
            )
            self._check_dtype("query", query)
            num_tokens = query.shape[0]  # a GPU would find a mismatch only after the call
            wanted = f"must have the plan's {batch.num_tokens} tokens, has {num_tokens}"
            require(num_tokens == batch.num_tokens, wanted, "query")
        return arguments

    def run(
        self,
        bound: BoundLayer,
        run: RunningPlan,
        batch: StepRows,
        tensors: LayerTensors,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write and attend with a bound layer that fits the batch. Returns the output, which is
        ``out`` if given. Raises InvalidRequestError for a bad id or length.
        """
        layers = self.bound
        if isinstance(layers, HostLayers):
            output, *seconds = layers.run(bound, batch, tensors, out)
            self.count(bound, run, seconds)
            return output
        query, key, value = tensors
        assert layers is not None and query is not None and key is not None
        of_token, num_tokens = bound.token_bytes, bound.num_tokens
        num_context = run.num_context_tokens(bound.window_tokens)
        with self._streams.computing():
            with self._times.timing("write", num_tokens * of_token):
                layers.write(bound, batch, key, value)
            with self._times.timing("attention", num_context * of_token):
                output = layers.attend(bound, batch, query, out)
        self._counters.num_written_tokens += num_tokens
        self._counters.num_attention_tokens += num_tokens
        return output

    def count(self, bound: BoundLayer, run: RunningPlan, seconds: Sequence[float]) -> None:
        """Add a call of a bound layer to the counters. ``seconds``: of writing, of attending."""
        counters, num_tokens = self._counters, bound.num_tokens
        write_s, attention_s = seconds
        num_context = run.num_context_tokens(bound.window_tokens)
        counters.kernel_s["write"] += write_s
        counters.kernel_s["attention"] += attention_s
        counters.kernel_bytes["write"] += num_tokens * bound.token_bytes
        counters.kernel_bytes["attention"] += num_context * bound.token_bytes
        counters.num_written_tokens += num_tokens
        counters.num_attention_tokens += num_tokens

    def clear(self, blocks: BlocksByTier) -> None:
        """Zero whole blocks, after all work queued before on the device."""
        for tier_key, of_tier in blocks.items():
            ids = torch.from_numpy(of_tier)
            if tier_of(tier_key) == pb.TIER_HOST:
                # On the device, only swaps touch this tier.
                self._streams.finish_swaps()
                self._host_kernels.clear_blocks(self._pools.tier(tier_key), ids)
            else:
                with self._streams.computing():
                    self._kernels.clear_blocks(self._pools.tier(tier_key), ids)
            self._counters.num_cleared_blocks += len(of_tier)

    def transfer(self, batch: Batch) -> None:
        """Start copies or swaps, to run after all work queued before."""
        direction = _DIRECTIONS[tier_of(batch.source), tier_of(batch.destination)]
        source = self._pools.tier(batch.source)
        num_bytes = len(batch.pairs) * source[0].nbytes
        timing = self._times.timing(direction, 2 * num_bytes)
        if direction == "copy":
            with self._streams.computing(), timing:
                self._kernels.copy_blocks(source, batch.pairs)
        else:
            destination = self._pools.tier(batch.destination)
            with self._streams.swapping(), timing:
                self._kernels.swap_blocks(source, destination, batch.pairs)
        self._counters.num_transferred_blocks[direction] += len(batch.pairs)
        self._counters.transfer_bytes[direction] += num_bytes

    def prepare(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch with its tensors moved to the kernels' device."""
        with self._streams.computing():
            return batch.to(self._device)

    def step_memory(self) -> StepMemory | None:
        """Return the memory that captured steps use; see ``Kernels.step_memory``."""
        return self._kernels.step_memory()

    def computing(self) -> AbstractContextManager[None]:
        """Queue the work inside on the caller's stream, after all work queued before."""
        return self._streams.computing()

    def queue(
        self,
        memory: StepMemory,
        write: WriteArguments,
        attention: AttentionArguments,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write and attend with memory at fixed addresses, so that both can be captured. Does not
        wait for work queued before on other streams.
        """
        self._kernels.reshape_and_cache(write)
        return memory.attend(attention, out)

    def count_step(self, num_tokens: int, num_layers: int) -> None:
        """Add a step to the counters whose layers were queued by ``queue``, or by a graph."""
        self._counters.num_written_tokens += num_tokens * num_layers
        self._counters.num_attention_tokens += num_tokens * num_layers

    def write(self, arguments: WriteArguments) -> None:
        """Write the keys and values of all spans of a plan in one layer."""
        num_bytes = len(arguments.slots) * bytes_of_token(arguments.keys, arguments.values)
        with self._streams.computing(), self._times.timing("write", num_bytes):
            self._kernels.reshape_and_cache(arguments)
        self._counters.num_written_tokens += len(arguments.slots)

    def slices(self, lengths: HostLengths | None, slice_s: float | None) -> list[range]:
        """Divide an attention call into ranges of rows that take ``slice_s`` seconds each. Returns
        none for a call of one slice, and on a GPU.
        """
        if slice_s is None or lengths is None or self._device.type != "cpu":
            return []
        slices = [*self._slice_sizes.slices(lengths, slice_s)]
        return slices if len(slices) > 1 else []

    def attend(
        self,
        arguments: AttentionArguments,
        num_context_tokens: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of all spans in one layer. Returns [num_tokens, num_heads,
        value_head_size], in ``out`` if given. ``num_context_tokens``: positions that it reads, for
        metrics.
        """
        there = {} if out is None else {"out": out}
        num_bytes = num_context_tokens * bytes_of_token(arguments.keys, arguments.values)
        timing = self._times.timing("attention", num_bytes)
        with self._streams.computing(), timing, self._slice_sizes.timing(arguments):
            output = self._kernels.paged_attention(arguments, **there)
        self._counters.num_attention_tokens += len(arguments.query)
        return output

    def read(
        self,
        tier_key: TierKey,
        blocks: NDArray[np.int32],
        layers: range,
        num_slots: NDArray[np.int64],
    ) -> torch.Tensor:
        """Copy layers of blocks out, to the tier's device. ``layers``: of the group's.
        ``num_slots``: [num_blocks], leading slots copied of each block; the others are 0. Returns
        [num_layers, num_blocks, ...], the pool's shape of a page at the end.
        """
        pages = self._gather(tier_key, blocks, layers)
        shape = self._pools.page_shapes[group_of(tier_key)]
        with self._streams.computing():
            for i in np.flatnonzero(num_slots < self._block_size_tokens).tolist():
                shape.clear_slots(pages, i, int(num_slots[i]))
        return pages

    def _gather(self, tier_key: TierKey, blocks: NDArray[np.int32], layers: range) -> torch.Tensor:
        ids = torch.from_numpy(blocks.astype(np.int64))
        of_layers = self._pools.tier(tier_key)[:, layers.start : layers.stop]
        if tier_of(tier_key) == pb.TIER_HOST:
            self._streams.finish_swaps()
            return self._host_kernels.gather_blocks(of_layers, ids)
        with self._streams.computing():
            return self._kernels.gather_blocks(of_layers, ids)

    def finish(self) -> None:
        """Wait until all queued work is done. Raises InternalError when the device failed, or a
        kernel reported a bad argument.
        """
        self._streams.finish()
        self._times.collect()
        try:
            with self._streams.computing():
                self._kernels.check_faults()
        except InvalidRequestError as error:
            raise InternalError(f"a kernel reported a bad argument: {error}") from error

    @contextmanager
    def rows(self, tier_key: TierKey, blocks: NDArray[np.int32]) -> Iterator[list[torch.Tensor]]:
        """Lend the memory of opaque blocks, uint8 [header and page] each, in order with kernels."""
        pool = self._pools.tier(tier_key)
        rows = [pool[block, 0] for block in blocks.tolist()]
        if tier_of(tier_key) == pb.TIER_HOST:
            self._streams.finish_swaps()
            yield rows
            return
        with self._streams.computing():
            yield rows

    @contextmanager
    def span_rows(
        self, batch: AttentionBatch, span: int, tokens: range
    ) -> Iterator[list[torch.Tensor]]:
        """Lend the ``rows`` of the whole blocks that some tokens of a span are written to."""
        block_size = self._block_size_tokens
        first, num = tokens.start // block_size, len(tokens) // block_size
        ids = batch.written_blocks[batch.written_by == span][first : first + num]
        with self.rows(tier_key_of(batch.group, pb.TIER_DEVICE), ids) as rows:
            yield rows
        self._counters.num_written_tokens += len(tokens)

    def check_blocks(self, group: int, layers: range, blocks: torch.Tensor) -> None:
        """Raise InvalidRequestError unless blocks of a group are shaped as ``read`` returns
        them.
        """
        pool = self._pools.tier(tier_key_of(group, pb.TIER_DEVICE))
        num_blocks = blocks.shape[1] if blocks.dim() == pool.dim() else 0
        check_blocks(blocks, (len(layers), num_blocks, *pool.shape[2:]), pool)

    def write_whole(
        self, group: int, layers: range, ids: NDArray[np.int64], blocks: torch.Tensor
    ) -> None:
        """Write layers of whole device blocks of a group from checked ``blocks``."""
        pool = self._pools.tier(tier_key_of(group, pb.TIER_DEVICE))
        with self._streams.computing():
            self._kernels.scatter_blocks(
                pool[:, layers.start : layers.stop], torch.from_numpy(ids), blocks
            )

    def tokens_of(
        self, batch: AttentionBatch, span: int, first_block: int, num_blocks: int
    ) -> range:
        """Return which of the span's tokens the table entries from ``first_block`` on hold, counted
        from its first. Raises InvalidRequestError when they hold none, and for a part of an opaque
        page.
        """
        block_size = self._block_size_tokens
        first = int(batch.first_positions[span])
        num_tokens = int(batch.starts[span + 1] - batch.starts[span])
        begin = max(first_block * block_size - first, 0)
        end = min((first_block + num_blocks) * block_size - first, num_tokens)
        require(
            first_block >= 0 and begin < end,
            "the blocks hold no token of the span, whose tokens are in the table's entries "
            f"{first // block_size} to {(first + num_tokens - 1) // block_size}",
            "entries",
        )
        if self._pools.page_shapes[batch.group].is_opaque:
            is_whole = (first + begin) % block_size == 0 and (end - begin) % block_size == 0
            wanted = f"an opaque page is written whole: compute whole blocks of {block_size} tokens"
            require(is_whole, wanted, "entries")
        return range(begin, end)

    def write_span(
        self,
        batch: AttentionBatch,
        span: int,
        layers: range,
        first_block: int,
        blocks: torch.Tensor,
        tokens: range,
    ) -> None:
        """Write the slots of some tokens of a span from checked ``blocks``, and no other slot.

        Blocks hold elements as stored, so their bits are copied: fp8 is not rounded again.
        """
        block_size = self._block_size_tokens
        position = int(batch.first_positions[span]) + tokens.start
        num_whole = 0 if position % block_size else len(tokens) // block_size
        if num_whole:
            entry = position // block_size - int(batch.first_positions[span]) // block_size
            ids = batch.written_blocks[batch.written_by == span][entry : entry + num_whole]
            given = position // block_size - first_block
            self.write_whole(batch.group, layers, ids, blocks[:, given : given + num_whole])
        rest = tokens[num_whole * block_size :]
        if rest:
            self._write_slots(batch, span, layers, first_block, blocks, rest)
        self._counters.num_written_tokens += len(tokens) * len(layers)

    def _write_slots(
        self,
        batch: AttentionBatch,
        span: int,
        layers: range,
        first_block: int,
        blocks: torch.Tensor,
        tokens: range,
    ) -> None:
        """Do as ``write_span`` does, with one copy for each slot."""
        block_size = self._block_size_tokens
        start = int(batch.starts[span])
        first = int(batch.first_positions[span]) + tokens.start - first_block * block_size
        bits = _BITS[blocks.element_size()]
        pool = self._pools.tier(tier_key_of(batch.group, pb.TIER_DEVICE))
        with self._streams.computing():
            slots = batch.slots[start + tokens.start : start + tokens.stop]
            block_ids, offsets = slots // block_size, slots % block_size
            for i, layer in enumerate(layers):
                page = self._pools.page_shapes[batch.group]
                given = page.stored(blocks[i].view(bits))
                for stored, new in zip(page.stored(pool[:, layer]), given, strict=True):
                    # [num_blocks, heads, block_size, elements] -> [tokens, heads, elements]
                    rows = new.transpose(1, 2).flatten(0, 1)[first : first + len(tokens)]
                    stored.view(bits)[block_ids, :, offsets] = rows

    def _check_pattern(self, options: AttentionOptions) -> None:
        """Raise InvalidRequestError for a pattern that counts the model's query heads in a shard
        that has only some of a KV head's, because it does not know which.
        """
        pattern = options.block_pattern
        require(
            pattern is None or pattern.head_sliding_step <= 0 or not self._is_copy,
            "must not be positive in a shard that is a copy of a KV head",
            "options.block_pattern.head_sliding_step",
        )

    def _check_dtype(self, name: str, tensor: torch.Tensor) -> None:
        """Raise InvalidRequestError for a dtype that is not the layout's: kernels would
        round it.
        """
        wanted, has = (str(dtype).removeprefix("torch.") for dtype in (self._dtype, tensor.dtype))
        require(has == wanted, f"must have the layout's dtype {wanted}, has {has}", name)


def check_window(window_tokens: int, most: int | None) -> None:
    """Raise InvalidRequestError for a window, 0 for none, that reaches trimmed entries."""
    if most is not None:
        require(
            0 < window_tokens <= most,
            f"must be 1 to {most}, because earlier entries were trimmed from a block table, "
            f"is {window_tokens or 'without a window'}",
            "options.sliding_window_tokens",
        )


@contextmanager
def _errors_under(prefix: str) -> Iterator[None]:
    """Prefix the field that an InvalidRequestError names, for errors raised inside the context."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field=f"{prefix}{error.field}") from None


def layer_scales(layout: Layout, shard: Shard, device: torch.device) -> list[_LayerScales]:
    """Return the scales of keys and values of each layer of ``shard``, ascending: float32 [KV heads
    held of its group] on ``device``, or None where the layout has no scales, which means that all
    are 1.
    """
    of_layer: dict[int, _LayerScales] = {}
    for i in range(len(layout.attention_groups)):
        scales = _group_scales(layout, shard, i, device)
        of_layer |= zip(shard.group_layers(layout, i), scales, strict=True)
    return [of_layer[layer] for layer in shard.layers(layout)]


def _group_scales(
    layout: Layout, shard: Shard, index: int, device: torch.device
) -> list[_LayerScales]:
    group, heads = layout.groups[index], shard.kv_heads(layout, index)
    held = [group.layers.index(layer) for layer in shard.group_layers(layout, index)]

    def of_held(scales: Sequence[float]) -> list[torch.Tensor | None]:
        if not scales:
            return [None] * len(held)
        # A layer's single scale applies to all of its heads.
        of_all = torch.tensor(scales, dtype=torch.float32).view(len(group.layers), -1)
        of_heads = of_all.expand(-1, group.num_kv_heads)[held, heads.start : heads.stop]
        return list(of_heads.contiguous().to(device))

    is_latent = group.cache_kind == LATENT  # a value is a part of its key
    values = group.key_scales if is_latent else group.value_scales
    return list(zip(of_held(group.key_scales), of_held(values), strict=True))


class _HostTimes:
    """Times the kernels of one executor, and counts the bytes that they have to move: on the CPU,
    where a call has finished when it returns.
    """

    def __init__(self, counters: ExecutorCounters) -> None:
        self._counters = counters

    @contextmanager
    def timing(self, kernel: str, num_bytes: int) -> Iterator[None]:
        """Time the work that is queued inside on the current stream as a call of ``kernel``, which
        has to read and write ``num_bytes``.
        """
        begin_s = time.perf_counter()
        yield
        self._counters.kernel_s[kernel] += time.perf_counter() - begin_s
        self._counters.kernel_bytes[kernel] += num_bytes

    def collect(self) -> None:
        """Add the timed calls that have ended to the counters, where ``timing`` has not."""


class _DeviceTimes(_HostTimes):
    """Times kernels on a GPU, by events on the stream."""

    def __init__(self, counters: ExecutorCounters) -> None:
        super().__init__(counters)
        self._num_calls = Counter[str]()
        self._pending = deque[tuple[str, int, Any, Any]]()

    @contextmanager
    def timing(self, kernel: str, num_bytes: int) -> Iterator[None]:
        self._num_calls[kernel] += 1
        if (
            self._num_calls[kernel] % _TIMED_CALLS != 1
            or len(self._pending) == _MAX_PENDING
            or torch.cuda.is_current_stream_capturing()
        ):
            yield
            return
        begin: Any = _event()
        end: Any = _event()
        begin.record()
        yield
        end.record()
        self._pending.append((kernel, num_bytes, begin, end))

    def collect(self) -> None:
        while self._pending and self._pending[0][3].query():
            kernel, num_bytes, begin, end = self._pending.popleft()
            self._counters.kernel_s[kernel] += begin.elapsed_time(end) / 1000
            self._counters.kernel_bytes[kernel] += num_bytes


def _event() -> Any:
    make: Any = torch.cuda.Event  # untyped
    return make(enable_timing=True)


def kernel_times(device: torch.device, counters: ExecutorCounters) -> _HostTimes:
    """Return the timer for kernels on ``device``."""
    return _DeviceTimes(counters) if device.type == "cuda" else _HostTimes(counters)
