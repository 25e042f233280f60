"""Opaque pages on their way: through the region of a data plane on this machine, or in messages.

buffers of the caller ──► region ──► blocks       one copy on either side
                     └──► message ──► blocks      where there is no region, or a page is larger
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from kvplane.execution.shard_execution import ShardExecution
from kvplane.transport.local import packets
from kvplane.transport.local.connection import LocalConnection
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.protocol import MAX_LAYER_BYTES
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb

# Those of 2 or 4 MiB load 24 MiB in 0.8 of the time of those of 8 (benchmarks.blocks --remote):
# one is made while another is sent. One page is always sent whole.
_MESSAGE_BYTES: Final = 2 << 20
_MAX_PAGES: Final = 512  # that a packet has room for, with their keys
_NAMES_BYTES: Final = 64  # that name the region and the kind of the message


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
