"""Sends changed requests to both planes, as processes, and says what came of it.

Every plane must answer each of them with a status of its own: an INTERNAL or UNKNOWN one, a
traceback in its log, much memory, silence, or another caller that is not served any more is a find.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from kvplane import ops
from kvplane.integrations.push import push_pb2
from kvplane.wire import protocol
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import execution_pb2 as dpb
from kvplane.wire.v1 import execution_pb2_grpc, pool_pb2, prefix_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.e2e.engine_planes import free_port
from tests.fuzz.callers import NUM_BLOCKS, NUM_HOST_BLOCKS, Client, Engine
from tests.fuzz.fuzzer import NUM_LANES, PATIENCE_S, Fuzzer, Lane, Result
from tests.helpers.attacked_planes import PlaneProcess, data_plane_process
from tests.helpers.data.plan_author import set_blocks
from tests.helpers.honest_caller import beat
from tests.helpers.planning.control_wire import RawSession, RawShard, stub_of

MAX_GROWTH_BYTES = 512 << 20
# The honest session at a data plane: an id that no changed one comes to.
_HONEST = 0x5AFE_5AFE_5AFE
SERVICES: dict[str, ServiceDescriptor] = {
    **cpb.DESCRIPTOR.services_by_name,
    **pool_pb2.DESCRIPTOR.services_by_name,
    **prefix_pb2.DESCRIPTOR.services_by_name,
    **dpb.DESCRIPTOR.services_by_name,
    **push_pb2.DESCRIPTOR.services_by_name,
    **rpb.DESCRIPTOR.services_by_name,
}
CONTROL_SERVICES = ["Server", "Pool", "Prefix", "Session", "Registration"]
DATA_SERVICES = ["Server", "Execution", "Block", "Push"]


async def run(folder: Path, *, num_inputs: int, seed: int) -> Result:
    """Half of the inputs go to each plane."""
    result = Result()
    for number, attack in enumerate((_control, _data)):
        own = await attack(folder, num_inputs // 2, 2 * seed + number)
        result.num_inputs += own.num_inputs
        result.calls += own.calls
        result.answers += own.answers
        result.found += own.found
        result.seconds += own.seconds
    return result


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=protocol.CHANNEL_OPTIONS)


async def _control(folder: Path, num_inputs: int, seed: int) -> Result:
    with PlaneProcess("control_plane", folder) as plane:
        async with AsyncExitStack() as stack:
            honest, channel = [
                await stack.enter_async_context(_channel(plane.address)) for _ in range(2)
            ]
            stub = stub_of(honest)
            shard = await RawShard.joined(stub, num_device_blocks=1024)
            victim = await RawSession.open(stub, shard)

            async def probe() -> None:
                await victim.admit(victim.number + 1, [*range(20)], wait=True)
                await victim.step(ops.free([victim.number]))

            async def session(lane: Lane) -> None:
                opened = (await RawSession.open(stub, shard)).opened
                await lane.speak(Engine(opened, shard.key, shard.hello.epoch))
                await stub.CloseSession(cpb.CloseSessionRequest(session=opened.session))

            fuzzer = Fuzzer(shard.key, probe)
            for service in CONTROL_SERVICES:
                fuzzer.serve(SERVICES[f"{service}Service"], channel)
            beats = asyncio.create_task(beat(shard, victim))
            begin_bytes = plane.begin_peak()
            await fuzzer.attack(num_inputs, seed, session)
            beats.cancel()
            shard.hang_up()
        return _inspected(plane, begin_bytes, fuzzer.result)


async def _data(folder: Path, num_inputs: int, seed: int) -> Result:
    push_address = f"127.0.0.1:{free_port()}"
    flags = ["--num-host-blocks", str(NUM_LANES * NUM_HOST_BLOCKS), "--plug-ins", "push"]
    flags += ["--file-tier-dir", str(folder / "files"), "--file-tier-bytes", str(1 << 24)]
    pushing = {"KVPLANE_PUSH_BIND": push_address, "KVPLANE_PUSH_TO": "127.0.0.1"}
    async with data_plane_process(folder, NUM_LANES * NUM_BLOCKS, *flags, variables=pushing) as (
        plane,
        side,
        author,
    ):
        async with _channel(plane.address) as channel, _channel(push_address) as pushes:
            stub = execution_pb2_grpc.ExecutionServiceStub(channel)
            grant = author.grant(_HONEST, ordinal=1)
            numbers = itertools.count(1)
            session_ids = [itertools.count(2 + i, NUM_LANES) for i in range(NUM_LANES)]

            async def probe() -> None:
                changes = [set_blocks(1, [])]
                plan = author.plan(next(numbers), _HONEST, previous=0, resync=True, changes=changes)
                request = dpb.StartPlanRequest(grant=grant, plan=plan)
                assert (await stub.CopyBlocks(request, timeout=PATIENCE_S)).HasField("receipt")

            async def session(lane: Lane) -> None:
                client = Client(author, next(session_ids[lane.number]), lane.number)
                await lane.speak(client)
                ended = author.session(client.session_id)
                side.say(fence=rpb.Fence(session=ended, ordinal=client.session_id))

            fuzzer = Fuzzer(side.key, probe)
            for service in DATA_SERVICES:
                fuzzer.serve(SERVICES[f"{service}Service"], channel)
            fuzzer.serve(SERVICES["BlockPushService"], pushes)
            await probe()  # before grants that are changed and signed again can open the session
            begin_bytes = plane.begin_peak()
            await fuzzer.attack(num_inputs, seed, session)
        return _inspected(plane, begin_bytes, fuzzer.result)


def _inspected(plane: PlaneProcess, begin_bytes: int, result: Result) -> Result:
    """With what the process itself shows: its end, its log, its memory."""
    log = plane.log_file.read_text(errors="replace")
    if plane.process.poll() is not None:
        result.found.append(f"the process has ended: {log[-2000:]}")
    else:
        grown_bytes = plane.peak_bytes() - begin_bytes
        if grown_bytes > MAX_GROWTH_BYTES:
            result.found.append(f"it took {grown_bytes} bytes more: {plane.log_file}")
    if "Traceback" in log:
        result.found.append(log[log.index("Traceback") :][:2000])
    return result
