"""What the two registration streams of a data plane have in common: that to the control plane which
leads (``registration_client``), and those to control planes that stand by (``ahead_client``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from data_plane.executor import Executor
from data_plane.places import place_of
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import KvplaneError, PlaneUnavailableError, ProtocolMismatchError
from kvplane.transport.connection import BROKEN_CALL
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns, protocol
from kvplane.wire.block_digests import RANGE_BLOCKS
from kvplane.wire.columns import INT32
from kvplane.wire.error_codec import from_rpc_error

BLOCKS_PER_REPORT: Final = 2048
# Engines' commands wait for as many digests: some milliseconds.
_RANGES_PER_PIECE: Final = 128
_RANGES_PER_REPORT: Final = BLOCKS_PER_REPORT // RANGE_BLOCKS
_ANSWER_TIMEOUT_S: Final = 30.0
_HEARTBEAT_RANGE_S: Final = (0.01, 3600.0)


def hello_of(executor: Executor, address: str, *, is_ahead: bool = False) -> pb.Hello:
    """``address``: where clients reach the executor."""
    return pb.Hello(
        protocol=protocol.supported(),
        pool_id=executor.pool_id,
        shard=executor.shard.to_proto(),
        epoch=executor.epoch,
        layout=executor.layout.to_proto(),
        num_device_blocks=executor.pools.device_tier.shape[0],
        num_host_blocks=executor.pools.host_tier.shape[0],
        groups=_groups(executor),
        address=address,
        incarnation=executor.incarnation,
        key_id=executor.key_id,
        is_ahead=is_ahead,
        has_file_tier=executor.published.is_watched,
    )


async def report_differences(
    stream: RegistrationStream, executor: Executor, worker: WorkerThread, since: int = 0
) -> int:
    """Send digests, of all blocks or of what has changed since, and report what differs. Returns
    what to give as ``since`` next time. Raises KvplaneError.

    Commands of engines run between the pieces of it.
    """
    while await worker.run(partial(executor.digests.refresh, _RANGES_PER_PIECE)):
        pass
    computed, digests = await worker.run(partial(executor.digests.messages, since))
    for part in digests:
        await stream.send(pb.RegisterRequest(digests=part))
    request = (await stream.expect("report_request")).report_request
    for piece in _pieces(request):
        for report in await worker.run(partial(executor.report, BLOCKS_PER_REPORT, [piece])):
            report.last = False
            await stream.send(pb.RegisterRequest(report=report))
    await stream.send(pb.RegisterRequest(report=pb.BlockReport(last=True)))
    await stream.expect("report_accepted")
    return computed


def _pieces(request: pb.ReportRequest) -> list[pb.BlockRanges]:
    return [
        pb.BlockRanges(
            group=of_place.group,
            tier=of_place.tier,
            ranges=columns.pack(INT32, numbers[begin : begin + _RANGES_PER_REPORT]),
        )
        for of_place in request.ranges
        for numbers in [columns.read(INT32, of_place.ranges, "report_request.ranges")]
        for begin in range(0, len(numbers), _RANGES_PER_REPORT)
    ]


class RegistrationStream:
    """A registration stream that raises KvplaneErrors and serializes its writes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._turn = asyncio.Lock()

    async def send(self, request: pb.RegisterRequest) -> None:
        try:
            async with self._turn:
                await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise PlaneUnavailableError("the stream has ended") from error

    async def receive(self) -> pb.RegisterResponse:
        try:
            response: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error
        if response is grpc.aio.EOF:
            raise PlaneUnavailableError("the control plane ended the stream")
        message: pb.RegisterResponse = response
        return message

    async def expect(self, kind: str) -> pb.RegisterResponse:
        """The next message, which has to be a ``kind`` and arrive within _ANSWER_TIMEOUT_S."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                response = await self.receive()
        except TimeoutError:
            raise PlaneUnavailableError(
                f"the control plane sent no {kind} within {_ANSWER_TIMEOUT_S:g} s"
            ) from None
        has = response.WhichOneof("message")
        if has != kind:
            raise PlaneUnavailableError(f"the control plane sent {has} instead of {kind}")
        return response

    def cancel(self) -> None:
        self._call.cancel()


def _typed(error: grpc.aio.AioRpcError) -> KvplaneError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolMismatchError(
            f"the control plane is not served there: is --control-plane right? {error.details()}"
        )
    if error.details() == BROKEN_CALL:  # it ended while this side wrote
        return PlaneUnavailableError("the stream broke")
    return from_rpc_error(error)


@asynccontextmanager
async def beating(stream: RegistrationStream, welcome: pb.Welcome) -> AsyncIterator[None]:
    """Send heartbeats while inside. A failed send is ignored: reading the stream fails too."""
    shortest_s, longest_s = _HEARTBEAT_RANGE_S
    interval_s = min(max(welcome.heartbeat_interval.ToNanoseconds() / 1e9, shortest_s), longest_s)

    async def beat() -> None:
        while True:
            await asyncio.sleep(interval_s)
            await stream.send(pb.RegisterRequest(heartbeat=pb.Heartbeat()))

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _groups(executor: Executor) -> list[pb.GroupBlocks]:
    """The blocks of each layer group; none where there is one group."""
    num_groups, num_blocks = len(executor.layout.groups), executor.pools.num_blocks
    if num_groups == 1:
        return []
    return [
        pb.GroupBlocks(
            num_device_blocks=num_blocks[place_of(group, tpb.TIER_DEVICE)],
            num_host_blocks=num_blocks[place_of(group, tpb.TIER_HOST)],
        )
        for group in range(num_groups)
    ]
