"""Callers beside those of a test, in processes of their own.

    honest_caller.py engine ADDRESS
    honest_caller.py decoder CONTROL TOKEN_FILE NUM_SESSIONS PAUSE_S

``engine`` holds a pool and a session, and makes a step every few milliseconds. ``decoder`` decodes
in several sessions at once, on both planes over TLS, with PAUSE_S between two steps of a session.
Then a line of stdin for each period, its seconds; the answer is a line of JSON: how long each step
took, in seconds.

    honest_caller.py deaf ADDRESS FILE NUM

asks a data plane for the same blocks many times at once, by the ReadBlocksRequest in FILE, and says
when it has. Who started it can stop it then: it reads none of its answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from kvplane import ControlClient, Execution, Session, Tensor, Tls, ops
from kvplane.wire import protocol
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.execution_pb2 import ReadBlocksRequest
from tests.helpers.planning.control_wire import RawSession, RawShard, stub_of

PAUSE_S = 0.002
HEARTBEAT_S = 1.0
MIN_STEPS = 20
POOL_ID = "pool"
TLS = Path(__file__).parents[1] / "rpc" / "tls"
PROMPT = range(20)
NUM_NEW_TOKENS = 16


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def serve_periods(period: Callable[[float], Awaitable[list[float]]]) -> None:
    """Say the latencies of each period that is asked for."""
    say([])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        say(await period(float(line)))


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

        await serve_periods(period)
        beats.cancel()
        shard.hang_up()


@dataclass
class Decoder:
    """One session and its execution."""

    session: Session
    execution: Execution
    pause_s: float

    async def period(self, seconds: float) -> list[float]:
        """Return the latency of each decode step, with all its layers."""
        latencies: list[float] = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            await self.step(ops.admit(1, PROMPT))
            for position in range(len(PROMPT), len(PROMPT) + NUM_NEW_TOKENS):
                begin_s = time.perf_counter()
                await self.step(ops.append(1, [5], 1, first_positions=position))
                latencies.append(time.perf_counter() - begin_s)
                await asyncio.sleep(self.pause_s)
            await self.step(ops.free([1]))
        return latencies

    async def step(self, operation: pb.Operation) -> None:
        answer = await self.session.step([operation])
        assert not answer.results[0].failures, answer.results[0].failures[0]
        if answer.plan is None:
            return
        await self.execution.start(answer.plan)
        for layer in [] if self.execution.has_run else self.execution.layers:
            rows = Tensor.zeros("float32", self.execution.key_shape(layer))
            await self.execution.layer(layer, rows, rows, rows)


async def decoder(control: str, token_file: str, num_sessions: str, pause_s: str) -> None:
    tls = Tls(ca_file=TLS / "ca.pem", server_name="kvplane.test", token_file=Path(token_file))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ControlClient(control, tls=tls))
        decoders = []
        for _ in range(int(num_sessions)):
            session = await stack.enter_async_context(client.open_session(POOL_ID))
            execution = await stack.enter_async_context(session.open_execution())
            decoders.append(Decoder(session, execution, float(pause_s)))

        async def period(seconds: float) -> list[float]:
            periods = await asyncio.gather(*(each.period(seconds) for each in decoders))
            return [latency for each in periods for latency in each]

        await serve_periods(period)


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
    asyncio.run({"engine": engine, "decoder": decoder, "deaf": deaf}[sys.argv[1]](*sys.argv[2:]))
