"""Changes requests, sends them to one plane, several at a time, and notes what came of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from kvplane.integrations.push import chunks
from kvplane.integrations.push import push_pb2 as ppb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.fuzz.callers import sent
from tests.fuzz.mutator import Mutator

NUM_LANES = 8
"""Callers at one time, on one connection."""
CALLS_A_SESSION = 40
PROBE_INPUTS = 100
PATIENCE_S = 60.0
FORBIDDEN = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")
STREAMS = ("StreamSteps", "Register", "WatchPrefixes", "Execute", "PushBlocks")
_MAX_FOUND = 20
_WATCH_S = 0.1
# What grpc.aio makes of a message that is written to a stream which the server has ended.
_ENDED = "Internal error from Core"


class Peer(Protocol):
    """Makes requests that a plane would grant."""

    def requests(self, rng: Any) -> tuple[str, list[Message]]: ...

    def heard(self, method: str, answer: bytes) -> None: ...


@dataclass(slots=True)
class Result:
    """What a run found. ``calls``: of each method. ``answers``: how often each status came."""

    num_inputs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Lane:
    """One caller after another; its requests follow from the seed and the answers."""

    def __init__(self, fuzzer: Fuzzer, number: int, seed: int) -> None:
        self.number = number
        self._fuzzer = fuzzer
        self._mutator = Mutator(f"{seed}.{number}")

    async def speak(self, peer: Peer) -> None:
        """All calls of one session, changed."""
        for _ in range(CALLS_A_SESSION):
            method, messages = peer.requests(self._mutator.random)
            data = [self._changed(message) for message in messages]
            answer = await self._fuzzer.send(method, data)
            if answer:
                peer.heard(method, answer)

    def _changed(self, message: Message) -> bytes:
        """The message changed, or what is in it and sealed: a payload, signed again with the pool's
        key, or a chunk with its checksum.
        """
        mutator = self._mutator
        if mutator.random.random() < 0.6:
            if isinstance(message, ppb.PushBlocksRequest) and message.HasField("chunk"):
                mutator.change(message.chunk)
                message.chunk.checksum = chunks._checksum(message.chunk, message.chunk.data)
                return message.SerializeToString()
            if signed := signed_payloads(message):
                sent(mutator.random.choice(signed), self._fuzzer.key, mutator.bytes_of)
                return message.SerializeToString()
        return mutator.bytes_of(message)


class Fuzzer:
    """The attack on one plane. ``key``: of its pool."""

    def __init__(self, key: bytes, probe: Callable[[], Awaitable[None]]) -> None:
        """``probe``: an honest caller's requests. Raises grpc.aio.AioRpcError if not served."""
        self.key = key
        self.result = Result()
        self._probe = probe
        self._probing = asyncio.Lock()
        self._next_probe = PROBE_INPUTS
        self._calls: dict[str, tuple[str, Any]] = {}

    def serve(self, service: ServiceDescriptor, channel: grpc.aio.Channel) -> None:
        """Where the service's methods are sent."""
        for method in service.methods:
            # Messages are those of the twin, but a service has the name that the contract gives it.
            path = f"/{service.full_name.replace('.wire.', '.', 1)}/{method.name}"
            call = channel.stream_stream if method.name in STREAMS else channel.unary_unary
            self._calls[method.name] = path, call(path)

    async def attack(
        self, num_inputs: int, seed: int, session: Callable[[Lane], Awaitable[None]]
    ) -> None:
        """Run ``session`` again and again, in all lanes, until there were so many inputs or enough
        was found.
        """
        loop = asyncio.get_running_loop()
        begin_s = loop.time()

        async def go_on(lane: Lane) -> None:
            while self.result.num_inputs < num_inputs and len(self.result.found) < _MAX_FOUND:
                try:
                    await session(lane)
                except grpc.aio.AioRpcError as error:
                    self.result.found.append(f"another caller is not served: {error}")

        lanes = [Lane(self, number, seed) for number in range(NUM_LANES)]
        await asyncio.gather(*map(go_on, lanes))
        await self._probe()
        self.result.seconds = loop.time() - begin_s

    async def send(self, method: str, data: list[bytes]) -> bytes | None:
        """Send messages, and note the status. Returns a unary call's answer.

        Now and then it waits for an honest caller to be served.
        """
        self.result.num_inputs += len(data)
        self.result.calls[method] += 1
        path, call = self._calls[method]
        answer = None
        try:
            if method in STREAMS:
                code = await _stream(method, call(timeout=PATIENCE_S), data)
            else:
                answer = await call(data[0], timeout=PATIENCE_S)
                code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if error.details() == _ENDED:
                code = "ended before all was sent"
            elif code in FORBIDDEN:
                self.result.found.append(f"{path} {code} {error.details()} {data[-1][:400].hex()}")
        self.result.answers[code] += 1
        if self.result.num_inputs >= self._next_probe:
            self._next_probe = self.result.num_inputs + PROBE_INPUTS
            async with self._probing:
                await self._probe()
        return answer


async def _stream(method: str, call: Any, data: list[bytes]) -> str:
    try:
        for each in data:
            await call.write(each)
        if method == "WatchPrefixes":  # it never ends of itself
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
