"""Checkpoints of states, read from and written to data planes in other processes.

states uint8 [num_state_layers, num, page_bytes] ──► of each shard: its layers, its part of a page
                                                 └─► messages of at most ``MAX_LAYER_BYTES``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvplane.errors import InternalError, InvalidRequestError
from kvplane.execution.execution import all_of
from kvplane.execution.shard_execution import ShardExecution
from kvplane.layout import BYTE, Layout
from kvplane.shard import Shard
from kvplane.tensor import Tensor
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.protocol import MAX_LAYER_BYTES
from kvplane.wire.v1 import execution_pb2 as pb


class _Part(NamedTuple):
    """Rows of a message, and their layers: ``num_layers`` of the shard, from ``layer`` on."""

    rows: range
    layer: int
    num_layers: int


class StateShards:
    """Reads and writes checkpoints of a session on all shards of its pool."""

    def __init__(
        self, executions: Sequence[ShardExecution], shards: Sequence[Shard], layout: Layout
    ) -> None:
        """``shards``: the part of the pool that each of ``executions`` is on."""
        if layout.state_group is None:
            raise InvalidRequestError("has no group of states", field="layout")
        self._group: int = layout.state_group
        self._layers = layout.groups[self._group].layers
        self._page_bytes = layout.groups[self._group].page_bytes
        self._shards = [
            (execution, shard.group_layers(layout, self._group), self._bytes_of(shard, layout))
            for execution, shard in zip(executions, shards, strict=True)
        ]

    async def read(self, sequence_ids: Sequence[int], entries: Sequence[int]) -> torch.Tensor:
        """Read the checkpoint of each sequence at the end of its block ``entries[i]``. Raises
        BlockNotWrittenError for one that is not written, and as ``Execution.read_blocks``.
        """
        shape = len(self._layers), len(sequence_ids), self._page_bytes
        states = torch.empty(shape, dtype=torch.uint8)

        async def read_one(execution: ShardExecution, layers: tuple[int, ...], held: slice) -> None:
            await execution.wait_started()
            for row, (sequence_id, entry) in enumerate(zip(sequence_ids, entries, strict=True)):
                for part in _parts(1, len(layers), held.stop - held.start):
                    request = pb.ReadBlocksRequest(
                        sequence_id=sequence_id,
                        entries=columns.pack(INT32, [entry]),
                        group=self._group,
                        first_layer=layers[part.layer],
                        num_layers=part.num_layers,
                    )
                    _, blocks = await execution.read_blocks(request, None)
                    there = self._places(layers, part)
                    states[there, row, held] = blocks.torch()[:, 0]

        await all_of([read_one(*shard) for shard in self._shards])
        return states

    async def write(
        self, sequence_ids: Sequence[int], entries: Sequence[int], states: torch.Tensor
    ) -> None:
        """Write checkpoints of the plan started last, shaped as ``read`` returns them."""
        shape = len(self._layers), len(sequence_ids), self._page_bytes
        if states.shape != shape or states.dtype != torch.uint8:
            raise InvalidRequestError(
                f"must be uint8 {list(shape)}, is {states.dtype} {list(states.shape)}",
                field="states",
            )
        here = states.cpu()

        async def write_one(
            execution: ShardExecution, layers: tuple[int, ...], held: slice
        ) -> None:
            for part in _parts(len(sequence_ids), len(layers), held.stop - held.start):
                rows = slice(part.rows.start, part.rows.stop)
                data = here[self._places(layers, part), rows, held].contiguous()
                request = pb.WriteBlocksRequest(
                    sequence_ids=columns.pack(INT64, sequence_ids[rows]),
                    entries=columns.pack(INT32, entries[rows]),
                    group=self._group,
                    first_layer=layers[part.layer],
                    num_layers=part.num_layers,
                    blocks=Tensor(BYTE, tuple(data.shape), data.numpy().tobytes()).to_proto(),
                )
                await execution.write_blocks(request, None)

        await all_of([write_one(*shard) for shard in self._shards])

    def _bytes_of(self, shard: Shard, layout: Layout) -> slice:
        """Return the bytes of a page that a shard holds."""
        parts = shard.kv_heads(layout, self._group)
        size = self._page_bytes // layout.groups[self._group].num_kv_heads
        return slice(parts.start * size, parts.stop * size)

    def _places(self, layers: Sequence[int], part: _Part) -> slice:
        """Return where a message's layers, which a shard has side by side, are in the group's."""
        first = self._layers.index(layers[part.layer])
        return slice(first, first + part.num_layers)


def _parts(num: int, num_layers: int, page_bytes: int) -> Iterator[_Part]:
    """Divide ``num`` rows of ``num_layers`` pages among messages."""
    if not num_layers or not page_bytes:
        raise InternalError("a shard holds no states")
    layers = max(1, min(num_layers, MAX_LAYER_BYTES // page_bytes))
    rows = max(1, MAX_LAYER_BYTES // (layers * page_bytes))
    for begin in range(0, num, rows):
        for layer in range(0, num_layers, layers):
            here = range(begin, min(begin + rows, num))
            yield _Part(here, layer, min(layers, num_layers - layer))
