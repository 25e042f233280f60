"""An honest engine beside attackers, in a process of its own: it holds a pool and a session, makes
a step every few milliseconds, and says how long each took.

    honest_caller.py ADDRESS        then a line of stdin for each period, its seconds;
                                    the answer is a line of JSON: the latencies, in seconds
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import grpc.aio

from kvplane import ops
from kvplane.wire import protocol
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import RawSession, RawShard, stub_of

PAUSE_S = 0.002
HEARTBEAT_S = 1.0
MIN_STEPS = 20


async def main(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=protocol.CHANNEL_OPTIONS) as channel:
        stub = stub_of(channel)
        shard = await RawShard.joined(stub, num_device_blocks=1024)
        session = await RawSession.open(stub, shard)
        beats = asyncio.create_task(beat(shard, session))
        tell([])
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            tell(await period(session, float(line)))
        beats.cancel()
        shard.hang_up()


def tell(latencies: list[float]) -> None:
    sys.stdout.write(json.dumps(latencies) + "\n")
    sys.stdout.flush()


async def beat(shard: RawShard, session: RawSession) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await shard.send(heartbeat=rpb.Heartbeat())
        await session.stub.RenewSession(pb.RenewSessionRequest(session=session.ref))


async def period(session: RawSession, seconds: float) -> list[float]:
    latencies = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(latencies) < MIN_STEPS:
        sequence_id = session.number + 1
        begin_s = time.perf_counter()
        await session.step(ops.admit(sequence_id, range(20)))
        latencies.append(time.perf_counter() - begin_s)
        await session.step(ops.free([sequence_id]))
        await asyncio.sleep(PAUSE_S)
    return latencies


asyncio.run(main(sys.argv[1]))
