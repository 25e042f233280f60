"""Sends changed requests to both planes, as processes, and says what came of it.

Every plane must answer each of them with a status of its own: an INTERNAL or UNKNOWN one, a
traceback in its log, much memory, silence, or another caller that is not served any more is a find.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from attacked_planes import PlaneProcess
from callers import NUM_BLOCKS, Client, Engine, sent
from control_wire import RawSession, RawShard
from data_server import write_layout
from google.protobuf.message import Message
from mutator import Mutator
from plan_author import POOL_ID, PlanAuthor, set_blocks
from register_side import RegisterSide

from kvplane import ops
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import control_pb2_grpc, data_pb2_grpc
from kvplane.v1 import data_pb2 as dpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import protocol

CALLS_A_SESSION = 40
PATIENCE_S = 60.0
MAX_GROWTH_BYTES = 512 << 20
FORBIDDEN = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")
_MAX_FOUND = 20
_WATCH_S = 0.1
# What grpc.aio makes of a message that is written to a stream which the server has ended.
_ENDED = "Internal error from Core"
STREAMS = ("Step", "Register", "Watch", "Execute")


@dataclass(slots=True)
class Result:
    """What a run found. ``answers``: how often each status came."""

    num_inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)


class Fuzzer:
    """One channel to one plane."""

    def __init__(self, service: str, channel: grpc.aio.Channel, mutator: Mutator, key: bytes):
        self._service = service
        self._channel = channel
        self._mutator = mutator
        self._key = key
        self.result = Result()

    async def send(self, method: str, messages: list[Message]) -> bytes | None:
        """Change the messages, send them, and note the status. Returns a unary call's answer."""
        data = [self._changed(message) for message in messages]
        self.result.num_inputs += len(data)
        path = f"/kvplane.v1.{self._service}/{method}"
        answer = None
        try:
            if method in STREAMS:
                code = await self._stream(path, data)
            else:
                answer = await self._channel.unary_unary(path)(data[0], timeout=PATIENCE_S)
                code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if error.details() == _ENDED:
                code = "ended before all was sent"
            elif code in FORBIDDEN:
                self.result.found.append(f"{path} {code} {error.details()} {data[-1][:400].hex()}")
        self.result.answers[code] += 1
        return answer

    async def _stream(self, path: str, data: list[bytes]) -> str:
        call = self._channel.stream_stream(path)(timeout=PATIENCE_S)
        try:
            for each in data:
                await call.write(each)
            if path.endswith("Watch"):  # it never ends of itself
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_S):
                        await call.read()
                call.cancel()
                return "OK"
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except asyncio.InvalidStateError:
            pass  # it has been refused already
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(),
                details=await call.details(),
            )  # fmt: skip
        return "OK"

    def _changed(self, message: Message) -> bytes:
        """The message changed, or a payload in it that is signed again with the pool's key."""
        signed = [*signed_payloads(message)]
        if signed and self._mutator.random.random() < 0.6:
            each = self._mutator.random.choice(signed)
            sent(each, self._key, self._mutator.bytes_of)
            return message.SerializeToString()
        return self._mutator.bytes_of(message)


def signed_payloads(message: Message) -> list[tpb.SignedPayload]:
    """All inside a message."""
    if isinstance(message, tpb.SignedPayload):
        return [message] if message.type else []
    found = []
    for part, value in message.ListFields():
        if part.message_type is not None:
            for each in value if part.is_repeated else [value]:
                found += signed_payloads(each)
    return found


async def run(folder: Path, *, num_inputs: int, seed: int) -> Result:
    """Half of the inputs go to each plane."""
    result = Result()
    for number, attack in enumerate((_control, _data)):
        own = await attack(folder, num_inputs // 2, 2 * seed + number)
        result.num_inputs += own.num_inputs
        result.answers += own.answers
        result.found += own.found
    return result


async def _until(fuzzer: Fuzzer, num_inputs: int, session: Callable[[], Awaitable[None]]) -> None:
    """Sessions, one after another, until there were so many inputs or enough was found."""
    while fuzzer.result.num_inputs < num_inputs and len(fuzzer.result.found) < _MAX_FOUND:
        try:
            await session()
        except grpc.aio.AioRpcError as error:
            fuzzer.result.found.append(f"another caller is not served: {error}")


async def _control(folder: Path, num_inputs: int, seed: int) -> Result:
    mutator = Mutator(seed)
    with PlaneProcess("control_plane", folder) as plane:
        async with AsyncExitStack() as stack:
            options = protocol.CHANNEL_OPTIONS
            honest, channel = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(plane.address, options=options)
                )
                for _ in range(2)
            ]
            stub = control_pb2_grpc.ControlPlaneServiceStub(honest)
            shard = RawShard(stub, num_device_blocks=1024)
            await shard.register()
            await shard.report()
            victim = await RawSession.open(stub, shard)
            beats = asyncio.create_task(_beat(shard, victim))
            fuzzer = Fuzzer("ControlPlaneService", channel, mutator, shard.key)

            async def session() -> None:
                opened = (await RawSession.open(stub, shard)).opened
                engine = Engine(opened, shard.key, shard.hello.epoch)
                for _ in range(CALLS_A_SESSION):
                    method, messages = engine.requests(mutator.random)
                    answer = await fuzzer.send(method, messages)
                    if method == "RunStep" and answer:
                        made = cpb.RunStepResponse.FromString(answer).result
                        engine.plans += [made.plan] if made.HasField("plan") else []
                await stub.CloseSession(cpb.CloseSessionRequest(session=opened.session))
                # Whatever was sent, another session is served.
                await victim.admit(victim.number + 1, [*range(20)], wait=True)
                await victim.step(ops.free([victim.number]))

            begin_bytes = plane.begin_peak()
            await _until(fuzzer, num_inputs, session)
            beats.cancel()
            shard.hang_up()
        return _inspected(plane, begin_bytes, fuzzer.result)


async def _data(folder: Path, num_inputs: int, seed: int) -> Result:
    mutator = Mutator(seed)
    side = await RegisterSide(heartbeat_s=1.0).start()
    flags = ["--control-plane", side.address, "--pool-id", POOL_ID]
    flags += ["--layout", str(write_layout(folder)), "--num-threads", "1"]
    flags += ["--num-device-blocks", str(NUM_BLOCKS), "--num-host-blocks", "8"]
    with PlaneProcess("data_plane", folder, *flags) as plane:
        async with asyncio.timeout(PATIENCE_S):
            await side.accepted.wait()
        author = PlanAuthor(side.hellos[-1].epoch, side.incarnation, side.key)
        options = protocol.CHANNEL_OPTIONS
        async with grpc.aio.insecure_channel(plane.address, options=options) as channel:
            stub = data_pb2_grpc.DataPlaneServiceStub(channel)
            fuzzer = Fuzzer("DataPlaneService", channel, mutator, side.key)
            num_sessions = 1

            async def session() -> None:
                nonlocal num_sessions
                num_sessions += 1
                client = Client(author, num_sessions)
                for _ in range(CALLS_A_SESSION):
                    await fuzzer.send(*client.requests(mutator.random))
                ended = author.session(client.session_id)
                side.say(fence=cpb.Fence(session=ended, ordinal=client.session_id))
                await serve(num_sessions)  # whatever was sent, another session is served

            async def serve(number: int) -> None:
                changes = [set_blocks(1, [])]
                honest = author.plan(number, previous=0, resync=True, changes=changes)
                request = dpb.CopyBlocksRequest(grant=author.grant(), plan=honest)
                assert (await stub.CopyBlocks(request, timeout=PATIENCE_S)).HasField("receipt")

            # Before grants that are changed and signed again can open the session.
            await serve(1)
            begin_bytes = plane.begin_peak()
            await _until(fuzzer, num_inputs, session)
        result = _inspected(plane, begin_bytes, fuzzer.result)
    await side.stop()
    return result


async def _beat(shard: RawShard, session: RawSession) -> None:
    while True:
        await asyncio.sleep(1.0)
        await shard.send(heartbeat=cpb.Heartbeat())
        await session.stub.RenewSession(cpb.RenewSessionRequest(session=session.ref))


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
