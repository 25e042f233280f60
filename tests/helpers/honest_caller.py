"""Callers beside those of a test, in processes of their own.

    honest_caller.py engine ADDRESS

holds a pool and a session, and makes a step every few milliseconds. A line of stdin is the seconds
of a period; the answer is a line of JSON: how long each step took, in seconds.

    honest_caller.py deaf ADDRESS FILE NUM

asks a data plane for the same blocks many times at once, by the ReadBlocksRequest in FILE, and says
when it has. Who started it can stop it then: it reads none of its answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import grpc.aio

from kvplane import ops
from kvplane.wire import protocol
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.execution_pb2 import ReadBlocksRequest
from tests.helpers.planning.control_wire import RawSession, RawShard, stub_of

PAUSE_S = 0.002
HEARTBEAT_S = 1.0
MIN_STEPS = 20
PROMPT = range(20)


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def beat(shard: RawShard, session: RawSession) -> None:
    """Keep a data plane and a session alive."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await shard.send(heartbeat=rpb.Heartbeat())
        await session.stub.RenewSession(pb.RenewSessionRequest(session=session.ref))


async def engine(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=protocol.CHANNEL_OPTIONS) as channel:
        stub = stub_of(channel)
        shard = await RawShard.joined(stub, num_device_blocks=1024)
        session = await RawSession.open(stub, shard)
        beats = asyncio.create_task(beat(shard, session))

        async def period(seconds: float) -> list[float]:
            latencies: list[float] = []
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s or len(latencies) < MIN_STEPS:
                sequence_id = session.number + 1
                begin_s = time.perf_counter()
                await session.step(ops.admit(sequence_id, PROMPT))
                latencies.append(time.perf_counter() - begin_s)
                await session.step(ops.free([sequence_id]))
                await asyncio.sleep(PAUSE_S)
            return latencies

        say([])
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            say(await period(float(line)))
        beats.cancel()
        shard.hang_up()


async def deaf(address: str, file: str, num: str) -> None:
    request = ReadBlocksRequest.FromString(Path(file).read_bytes())
    async with grpc.aio.insecure_channel(address, options=protocol.CHANNEL_OPTIONS) as channel:
        stub = stub_of(channel)
        await stub.ReadBlocks(request)
        calls = [stub.ReadBlocks(request) for _ in range(int(num))]
        await asyncio.sleep(0.1)  # until they are sent
        say("sent")
        await asyncio.gather(*calls, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run({"engine": engine, "deaf": deaf}[sys.argv[1]](*sys.argv[2:]))
