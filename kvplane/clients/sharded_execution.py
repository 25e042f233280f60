"""Executions over all shards of a pool: one call a layer, which goes to the shards in parallel.

    query, key, value ──► of each shard's heads ──► its Execute stream ──► outputs, joined by heads

Nothing here is a transaction. Each shard has an execution of its own, with the same guarantees: a
call that failed or was cancelled may be made again, and a shard that had answered answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from kvplane.attention_options import AttentionOptions
from kvplane.clients.data_client import DataClient
from kvplane.clients.execution import Execution
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.shard import QueryHeads, Shard
from kvplane.tensor import Tensor, join_heads
from kvplane.transport.tls import Tls
from kvplane.wire.v1.types_pb2 import ShardInfo, SignedPayload

T = TypeVar("T")


class ShardedDataClient:
    """Calls the data planes of all shards of a pool, as ``Session.shards`` names them.

    ``clients``: one for each shard, by index, for calls to a single shard. ``timeout_s``,
    ``shared_memory``: as of ``DataClient``.
    """

    def __init__(
        self,
        shards: Sequence[ShardInfo],
        layout: Layout,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        self._shards = [Shard.from_proto(info.shard) for info in shards]
        self._layout = layout
        self.clients = [
            DataClient(info.address, tls=tls, timeout_s=timeout_s, shared_memory=shared_memory)
            for info in shards
        ]

    async def __aenter__(self) -> ShardedDataClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(
        self, grant: SignedPayload, *, timeout_s: float | None = None
    ) -> ShardedExecution:
        """Open an execution on every shard, which run the plans of the session of ``grant``."""
        opened = await all_of([each.open(grant, timeout_s=timeout_s) for each in self.clients])
        return ShardedExecution(opened, self._shards, self._layout)

    async def close(self) -> None:
        """Ends every call and execution."""
        await all_of([each.close() for each in self.clients])


@dataclass(frozen=True, slots=True)
class ShardsStarted:
    """All shards started a plan. ``num_tokens``: first extent of q, k and v.

    ``has_run``: every shard's receipt is there, because the plan has no spans or had run before.
    """

    plan_number: int
    num_tokens: int
    has_run: bool


class ShardedExecution:
    """Made by ``ShardedDataClient.open``. One call at a time: ``start``, then ``layer`` for each of
    the model's layers.
    """

    def __init__(
        self, executions: Sequence[Execution], shards: Sequence[Shard], layout: Layout
    ) -> None:
        self._executions = executions
        self._held: dict[int, list[_Part]] = {}  # by layer
        for execution, shard in zip(executions, shards, strict=True):
            for i in range(len(layout.groups)):
                part = _Part(
                    execution, shard.kv_heads(layout, i), QueryHeads.of(shard, shards, layout, i)
                )
                for layer in shard.group_layers(layout, i):
                    self._held.setdefault(layer, []).append(part)

    @property
    def only(self) -> Execution | None:
        """The one execution of a pool that is not sharded."""
        return self._executions[0] if len(self._executions) == 1 else None

    @property
    def layers(self) -> list[int]:
        """The layers that any shard holds, ascending."""
        return sorted(self._held)

    @property
    def receipts(self) -> list[SignedPayload]:
        """The receipts so far of the plan started last: one of each shard once it has run."""
        return [each.receipt for each in self._executions if each.receipt is not None]

    @property
    def has_run(self) -> bool:
        """Whether every shard's receipt is there."""
        return len(self.receipts) == len(self._executions)

    async def start(self, plan: SignedPayload, *, timeout_s: float | None = None) -> ShardsStarted:
        """Present a plan to every shard. Safe to repeat."""
        started = await all_of([x.start(plan, timeout_s=timeout_s) for x in self._executions])
        return ShardsStarted(started[0].plan_number, started[0].num_tokens, self.has_run)

    async def begin(
        self,
        plan: SignedPayload,
        num_tokens: int,
        *,
        pass_index: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """``Execution.begin`` on every shard."""
        begun = [
            x.begin(plan, num_tokens, pass_index=pass_index, timeout_s=timeout_s)
            for x in self._executions
        ]
        await all_of(begun)

    async def layer(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
        timeout_s: float | None = None,
    ) -> Tensor:
        """Write one layer's keys and values on the shards that hold it, then attend: [num_tokens,
        num_heads, value_head_size].

        ``query`` [num_tokens, num_heads, head_size], ``key``, ``value`` [num_tokens, num_kv_heads,
        head_size], of ``value`` value_head_size, and None where the layer keeps latents. Safe to
        repeat.
        """
        parts = self._held.get(index)
        if parts is None:
            raise InvalidRequestError(f"layer {index} is in no shard", field="layer")
        of_parts = [part.query_heads.ranges(query.shape[1]) for part in parts]
        outputs = await all_of(
            [
                part.execution.layer(
                    index,
                    query.of_heads(heads),
                    key.of_heads([part.kv_heads]),
                    None if value is None else value.of_heads([part.kv_heads]),
                    options=options.of_heads(heads),
                    timeout_s=timeout_s,
                )
                for part, heads in zip(parts, of_parts, strict=True)
            ]
        )
        return join_heads(list(zip(outputs, of_parts, strict=True)))

    async def close(self) -> None:
        """End the streams. Another execution can continue the plan."""
        await all_of([each.close() for each in self._executions])


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard's part of a layer."""

    execution: Execution
    kv_heads: range
    query_heads: QueryHeads


async def all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Await all, and only then raise the first error, so that none is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
