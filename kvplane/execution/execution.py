"""Executions: plans that all shards of a pool run, layer by layer.

    query, key, value ──► of each shard's heads ──► its Execute stream ──► outputs, joined by heads

Opaque pages on their way:

    buffers of the caller ──► region ──► blocks       one copy on either side
                         └──► message ──► blocks      where there is no region, or a page is larger

Nothing here is a transaction. Each shard has the same guarantees by itself: a call that failed or
was cancelled may be made again, and a shard that had answered answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast
from weakref import WeakSet

from kvplane import ops
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.execution.shard_execution import ShardExecution
from kvplane.layout import Layout
from kvplane.results import Pinned, ShardBlocks, Signed
from kvplane.shard import QueryHeads, Shard
from kvplane.tensor import Tensor, join_heads
from kvplane.transport.connection import Connection
from kvplane.transport.local import packets
from kvplane.transport.local.connection import LocalConnection
from kvplane.transport.opening import Opening
from kvplane.transport.tls import Tls
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, count, read
from kvplane.wire.protocol import MAX_LAYER_BYTES
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from kvplane.wire.v1.types_pb2 import SignedPayload

T = TypeVar("T")
# Those of 2 or 4 MiB load 24 MiB in 0.8 of the time of those of 8 (benchmarks.blocks --remote):
# one is made while another is sent. One page is always sent whole.
_MESSAGE_BYTES: Final = 2 << 20
_MAX_PAGES: Final = 512  # that a packet has room for, with their keys
_NAMES_BYTES: Final = 64  # that name the region and the kind of the message


class Execution:
    """Runs a session's plans on all shards. Made by ``Session.open_execution``, or by
    ``DataClient.open`` for one shard alone. Not for concurrent calls: for each plan call ``start``
    (or ``begin``, which does not wait), then ``layer`` once for each of ``layers``.
    """

    def __init__(
        self,
        shards: Sequence[ShardExecution],
        parts: Sequence[Shard] = (),
        layout: Layout | None = None,
    ) -> None:
        """``parts``: which part of the pool each of several ``shards`` holds. ``layout``: the
        pool's, None if it is not known.
        """
        self._shards = shards
        self._only = shards[0] if len(shards) == 1 else None
        self._layout = layout
        self._held = {} if self._only or layout is None else _held(shards, parts, layout)

    async def __aenter__(self) -> Execution:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def layers(self) -> list[int]:
        """The layers that any shard holds, ascending."""
        return sorted({layer for shard in self._shards for layer in shard.layers})

    @property
    def num_tokens(self) -> int:
        """Tokens that the plan or pass started last computes: the first extent of q, k and v."""
        return self._shards[0].num_tokens

    @property
    def receipts(self) -> list[Signed]:
        """The receipts so far of the plan started last: one of each shard once it has run. An
        execution of ``Session.open_execution`` has added them to the session.
        """
        return [each.receipt for each in self._shards if each.receipt is not None]

    @property
    def has_run(self) -> bool:
        """Return whether the plan started last has every shard's receipt: no layer is expected
        then. A plan that computes nothing, or had run before, has them when it is started.
        """
        return all(each.receipt is not None for each in self._shards)

    async def start(
        self,
        plan: Signed | None,
        *,
        pass_index: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Present a plan, which makes its table changes and transfers. Safe to repeat.

        ``pass_index``: computes the plan in passes, one token of each span in each: see
        ``StartPlanRequest``. Raises InvalidRequestError for None, the plan of a step that changed
        nothing.
        """
        sent = cast(SignedPayload | None, plan)
        starts = [x.start(sent, pass_index=pass_index, timeout_s=timeout_s) for x in self._shards]
        await all_of(starts)

    async def begin(
        self,
        plan: Signed,
        num_tokens: int,
        *,
        pass_index: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start a plan or pass as ``start`` does, without waiting for the answer. ``num_tokens``:
        how many tokens it computes, at least one. The first ``layer`` takes the answer, and raises
        what ``start`` would have raised.
        """
        sent = cast(SignedPayload, plan)
        begins = [
            x.begin(sent, num_tokens, pass_index=pass_index, timeout_s=timeout_s)
            for x in self._shards
        ]
        await all_of(begins)

    async def layer(
        self,
        index: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
        timeout_s: float | None = None,
    ) -> Tensor:
        """Write one layer's keys and values, then attend: [num_tokens, num_heads, value_head_size].

        ``query`` [num_tokens, num_heads, head_size]; without it the answer has no elements.
        ``key``, ``value`` [num_tokens, num_kv_heads, head_size], of ``value`` value_head_size; none
        where the layer keeps latents. Safe to repeat.
        """
        if self._only is not None:
            return await self._only.layer(
                index, query, key, value, options=options, timeout_s=timeout_s
            )
        parts = self._held.get(index)
        if parts is None:
            raise InvalidRequestError(f"layer {index} is in no shard", field="layer")
        heads = [[] if query is None else x.query_heads.ranges(query.shape[1]) for x in parts]
        outputs = await all_of(
            [
                part.execution.layer(
                    index,
                    None if query is None else query.of_heads(own),
                    key.of_heads([part.kv_heads]),
                    None if value is None else value.of_heads([part.kv_heads]),
                    options=options.of_heads(own),
                    timeout_s=timeout_s,
                )
                for part, own in zip(parts, heads, strict=True)
            ]
        )
        return outputs[0] if query is None else join_heads(list(zip(outputs, heads, strict=True)))

    def key_shape(self, layer: int) -> tuple[int, int, int]:
        """Return the shape of a layer's keys: [num_tokens, num_kv_heads, head_size]. Raises
        InvalidRequestError for a layer that is not in the pool, and where ``DataClient.open`` made
        the execution, which then does not know the layout.
        """
        if self._layout is None:
            raise InvalidRequestError(
                "is not known: open the execution by its session", field="layout"
            )
        for group in self._layout.attention_groups:
            if layer in group.layers:
                return self.num_tokens, group.num_kv_heads, group.head_size
        raise InvalidRequestError(f"layer {layer} is in no group of the layout", field="layer")

    async def read_blocks(
        self,
        source: int | Pinned,
        entries: ops.Numbers = 0,
        *,
        group: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        keys: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[ShardBlocks]:
        """Read these entries of a sequence's table, or of what is pinned, from each shard.

        ``source``: the sequence's id, or what ``ops.pin`` found: see ``Pinned.entries``.
        ``num_layers``: layers read, from the model's layer ``first_layer`` on; 0 means all that
        each shard holds. ``keys``: of opaque pages, for each entry the caller's own key; an entry
        that was written with another is read as 0 bytes. Raises SequenceNotFoundError,
        BlockNotWrittenError for an entry in which nothing was written, and StaleGenerationError for
        one whose pin has ended and whose block was allocated again.
        """
        request = _read_request(source, entries, keys)
        request.group, request.first_layer, request.num_layers = group, first_layer, num_layers
        answers = await all_of([each.read_blocks(request, timeout_s) for each in self._shards])
        return [
            ShardBlocks(
                blocks,
                answer.layout_fingerprint,
                tuple(read(INT32, answer.num_bytes, "num_bytes")),
            )
            for answer, blocks in answers
        ]

    async def write_blocks(
        self,
        sequence_id: int,
        blocks: Sequence[ShardBlocks],
        entries: ops.Numbers = 0,
        *,
        group: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        keys: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Write the slots of the span that the plan started last has for a sequence.

        ``blocks``: one for each shard, as ``read_blocks`` returned them. ``entries``: the places in
        the table, which follow one another. ``first_layer``, ``num_layers``: as of ``read_blocks``.
        ``keys``: of opaque pages, the caller's own key of each entry, at most 64 bytes; empty for
        none.
        Raises LayoutMismatchError when blocks come from a pool of another layout.
        """
        if len(blocks) != len(self._shards):
            raise InvalidRequestError(
                f"has blocks of {len(blocks)} shards, must have those of {len(self._shards)}",
                field="blocks",
            )
        column = ops.pack_each(INT32, entries, "entries")
        sequence_ids = ops.pack_each(INT64, sequence_id, "sequence_id", count(INT32, column))
        requests = [
            pb.WriteBlocksRequest(
                sequence_ids=sequence_ids,
                entries=column,
                blocks=each.blocks.to_proto(),
                group=group,
                first_layer=first_layer,
                num_layers=num_layers,
                num_bytes=ops.pack_each(INT32, each.num_bytes, "num_bytes"),
                keys=keys,
                layout_fingerprint=each.layout_fingerprint,
            )
            for each in blocks
        ]
        writes = [
            shard.write_blocks(request, timeout_s)
            for shard, request in zip(self._shards, requests, strict=True)
        ]
        await all_of(writes)

    async def read_pages(
        self,
        source: int | Pinned,
        into: Sequence[memoryview],
        entries: ops.Numbers | None = None,
        *,
        keys: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[int]:
        """Read opaque pages into buffers, each of ``page_bytes``, through shared memory on the data
        plane's machine. ``source``, ``keys``: as of ``read_blocks``. ``entries``: None for those
        from the first on.

        Returns how many leading bytes of each page hold something; only these are copied. The
        buffers are not kept. Raises as ``read_blocks``.
        """
        shard, page_bytes = self._of_pages()
        rooms = [memoryview(room).cast("B") for room in into]
        for i, room in enumerate(rooms):
            if len(room) < page_bytes or room.readonly:
                raise InvalidRequestError(
                    f"must be a writable buffer of {page_bytes} bytes", field=f"into[{i}]"
                )
        request = _read_request(source, range(len(rooms)) if entries is None else entries, keys)
        if count(INT32, request.entries) != len(rooms):
            raise InvalidRequestError(f"must be {len(rooms)}, one for each buffer", field="entries")
        return await read_pages(shard, request, rooms, page_bytes, timeout_s)

    async def write_pages(
        self,
        plan: Signed,
        sequence_ids: ops.Numbers,
        pages: Sequence[bytes | memoryview],
        entries: ops.Numbers = 0,
        *,
        keys: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Start a plan and write opaque pages of it, through shared memory on the data plane's
        machine. No ``start`` is needed. Safe to repeat.

        ``sequence_ids``, ``entries``: for each page, its sequence and its place in the table; those
        of a sequence follow one another. ``pages``: of at most ``page_bytes`` each. ``keys``: as of
        ``write_blocks``.
        """
        shard, page_bytes = self._of_pages()
        parts = [memoryview(page).cast("B") for page in pages]
        for i, page in enumerate(parts):
            if len(page) > page_bytes:
                raise InvalidRequestError(
                    f"must be at most {page_bytes} bytes, is {len(page)}", field=f"pages[{i}]"
                )
        request = pb.WriteBlocksRequest(
            plan=cast(SignedPayload, plan),
            sequence_ids=ops.pack_each(INT64, sequence_ids, "sequence_ids", len(parts)),
            entries=ops.pack_each(INT32, entries, "entries", len(parts)),
            keys=keys,
        )
        for field, num in (
            ("sequence_ids", count(INT64, request.sequence_ids)),
            ("entries", count(INT32, request.entries)),
            ("keys", len(keys) or len(parts)),
        ):
            if num != len(parts):
                raise InvalidRequestError(f"must be {len(parts)}, one for each page", field=field)
        await write_pages(shard, request, parts, page_bytes, timeout_s)

    def _of_pages(self) -> tuple[ShardExecution, int]:
        """Return the shard of a pool of opaque pages, and their size. Raises InvalidRequestError
        for another pool.
        """
        page_bytes = self._layout.groups[0].page_bytes if self._layout is not None else 0
        if self._only is None or not page_bytes:
            raise InvalidRequestError("is not one of opaque pages, as far as known", field="layout")
        return self._only, page_bytes

    async def load_files(
        self, sequence_id: int, tokens: ops.Tokens, *, timeout_s: float | None = None
    ) -> int:
        """Write the span that the plan started last has for a sequence from files. ``tokens``: the
        sequence's, to the span's end.

        Returns the number of blocks that every shard has written. ``has_run`` is False afterwards
        when a file could not be used: abort the plan then.
        """
        column = ops.pack_tokens(tokens)
        return min(
            await all_of([x.load_files(sequence_id, column, timeout_s) for x in self._shards])
        )

    async def close(self) -> None:
        """End the streams to the shards. Another execution can continue the plan."""
        await all_of([each.close() for each in self._shards])


def _read_request(
    source: int | Pinned, entries: ops.Numbers, keys: Sequence[bytes]
) -> pb.ReadBlocksRequest:
    """Return a request for entries of a table or of pins."""
    column = ops.pack_each(INT32, entries, "entries")
    if isinstance(source, int):
        return pb.ReadBlocksRequest(sequence_id=source, entries=column, keys=keys)
    if source.grant is None:
        raise InvalidRequestError("holds nothing: no prompt was found", field="source")
    grant = cast(SignedPayload, source.grant)
    return pb.ReadBlocksRequest(pin_grant=grant, entries=column, keys=keys)


def shards_of(execution: Execution) -> Sequence[ShardExecution]:
    """Return the parts of an execution, by shard: for ``kvplane.runtime``, which calls them without
    an event loop, and for ``kvplane.prefixes``. Not for callers.
    """
    return execution._shards


class Executions:
    """Opens executions with a client's settings, and closes them with the client or session."""

    def __init__(
        self, *, tls: Tls | None = None, timeout_s: float = 10.0, shared_memory: bool = True
    ) -> None:
        """``tls``, ``timeout_s``, ``shared_memory``: as for ``DataClient``."""
        self._tls = tls
        self._timeout_s = timeout_s
        self._shared_memory = shared_memory
        self._opened: WeakSet[Execution] = WeakSet()

    def open(
        self,
        grant: Signed,
        addresses: Sequence[str],
        parts: Sequence[Shard] = (),
        layout: Layout | None = None,
        *,
        take_receipt: Callable[[Signed], None] | None = None,
        timeout_s: float | None = None,
    ) -> Opening[Execution]:
        """Open an execution on the data planes at ``addresses``. ``parts``, ``layout``: of the
        pool, as of ``Execution``. ``take_receipt``: as of ``ShardExecution``.
        """

        async def opened() -> Execution:
            shards = [
                ShardExecution(
                    Connection(address, tls=self._tls, timeout_s=self._timeout_s),
                    cast(SignedPayload, grant),
                    local=self._shared_memory,
                    take_receipt=take_receipt,
                )
                for address in addresses
            ]
            execution = Execution(shards, parts, layout)
            self._opened.add(execution)
            try:
                await all_of([each.connect(timeout_s=timeout_s) for each in shards])
            except BaseException:
                await execution.close()
                raise
            return execution

        return Opening(opened)

    async def close(self) -> None:
        """Close all executions that are open."""
        await all_of([each.close() for each in list(self._opened)])


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a layer that one shard computes."""

    execution: ShardExecution
    kv_heads: range
    query_heads: QueryHeads


def _held(
    executions: Sequence[ShardExecution], shards: Sequence[Shard], layout: Layout
) -> dict[int, list[_Part]]:
    """Return, for each layer, the parts that shards compute."""
    held: dict[int, list[_Part]] = {}
    for execution, shard in zip(executions, shards, strict=True):
        for i in range(len(layout.attention_groups)):
            heads = QueryHeads.of(shard, shards, layout, i)
            part = _Part(execution, shard.kv_heads(layout, i), heads)
            for layer in shard.group_layers(layout, i):
                held.setdefault(layer, []).append(part)
    return held


async def all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Await all calls, and only then raise the first error, so that none is left running."""
    if len(calls) == 1:
        return [await calls[0]]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def read_pages(
    shard: ShardExecution,
    request: pb.ReadBlocksRequest,
    into: Sequence[memoryview],
    page_bytes: int,
    timeout_s: float | None,
) -> list[int]:
    """Read pages into buffers of ``page_bytes`` or more. Returns how many leading bytes of each
    page hold something: those are copied. ``request``: for all of them.
    """
    num_bytes = list[int]()
    keys = list(request.keys)

    def request_of(part: range) -> pb.ReadBlocksRequest:
        return pb.ReadBlocksRequest(
            sequence_id=request.sequence_id,
            pin_grant=request.pin_grant if request.HasField("pin_grant") else None,
            entries=columns.part(INT32, request.entries, part.start, part.stop),
            keys=keys[part.start : part.stop],
        )

    def take(asked: pb.ReadBlocksRequest, answer: pb.ReadBlocksResponse, pages: memoryview) -> None:
        length = columns.count(INT32, asked.entries)
        found = columns.read(INT32, answer.num_bytes, "num_bytes", length=length)
        for i, num in enumerate(found):
            into[len(num_bytes)][:num] = pages[i * page_bytes : i * page_bytes + num]
            num_bytes.append(num)

    async def attempt() -> None:
        """Read what was not read yet."""
        requests = map(request_of, _parts(shard, len(num_bytes), len(into), page_bytes))
        if shard.local is None:
            await shard.read_in_stream(requests, take)
            return
        for mine in requests:
            if (local := _region_for(shard, mine, page_bytes)) is not None:
                mine.output.region_id = local.region_id
                answer = (await shard.ask_region(local, pb.ExecuteRequest(read=mine))).read
                take(mine, answer, memoryview(local.memory))
            else:
                await shard.read_in_stream([mine], take)

    await shard.in_turn(shard.deadline(timeout_s), attempt)
    return num_bytes


async def write_pages(
    shard: ShardExecution,
    request: pb.WriteBlocksRequest,
    pages: Sequence[memoryview],
    page_bytes: int,
    timeout_s: float | None,
) -> None:
    """Write pages of the request's plan, which need not have been started. ``request``: for all of
    them. The receipt comes with the last one.
    """
    keys = list(request.keys)

    async def attempt(part: range) -> None:
        given = pages[part.start : part.stop]
        mine = pb.WriteBlocksRequest(
            plan=request.plan,
            sequence_ids=columns.part(INT64, request.sequence_ids, part.start, part.stop),
            entries=columns.part(INT32, request.entries, part.start, part.stop),
            num_bytes=columns.pack(INT32, [len(page) for page in given]),
            keys=keys[part.start : part.stop],
            blocks=tpb.Tensor(dtype=tpb.ELEMENT_TYPE_UINT8, shape=(1, len(part), page_bytes)),
        )
        if (local := _region_for(shard, mine, page_bytes)) is not None:
            memory = memoryview(local.memory)
            for i, page in enumerate(given):
                memory[i * page_bytes : i * page_bytes + len(page)] = page
            mine.blocks.memory.region_id = local.region_id
            answer = (await shard.ask_region(local, pb.ExecuteRequest(write=mine))).written
        else:
            room = bytearray(len(given) * page_bytes)
            for i, page in enumerate(given):
                room[i * page_bytes : i * page_bytes + len(page)] = page
            mine.blocks.data = bytes(room)
            answer = await shard.send_blocks(mine, deadline.remaining_s)
        shard.take_receipt(answer, request.plan)

    deadline = shard.deadline(timeout_s)
    for part in _parts(shard, 0, len(pages), page_bytes):
        await shard.in_turn(deadline, partial(attempt, part))


def _parts(shard: ShardExecution, done: int, num_pages: int, page_bytes: int) -> Iterator[range]:
    """Yield the pages but the first ones, which are done, in parts that a request has room for."""
    while done < num_pages:
        local, room_bytes = shard.local, _MESSAGE_BYTES
        if local is not None and len(local.memory) >= page_bytes:
            room_bytes = min(len(local.memory), MAX_LAYER_BYTES)
        begin = done
        done = min(num_pages, done + max(1, room_bytes // page_bytes), done + _MAX_PAGES)
        yield range(begin, done)


def _region_for(
    shard: ShardExecution, request: pb.ReadBlocksRequest | pb.WriteBlocksRequest, page_bytes: int
) -> LocalConnection | None:
    """Return the connection whose region the request's pages go through; None if the region has no
    room for them, or a packet none for the request.
    """
    local, num_pages = shard.local, columns.count(INT32, request.entries)
    if local is None or len(local.memory) < num_pages * page_bytes:
        return None
    return local if request.ByteSize() + _NAMES_BYTES <= packets.MAX_PACKET_BYTES else None
