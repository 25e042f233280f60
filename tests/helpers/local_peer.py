"""A client of the data plane's Unix socket that may send anything."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import socket
from pathlib import Path
from typing import Any

import torch

from data_plane.server.server import DataPlaneServer
from kvplane.errors import KvplaneError
from kvplane.transport.local import packets
from kvplane.wire.error_messages import from_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.plan_author import PlanAuthor, dense_attention, set_blocks, span, tokens

FLOAT32 = tpb.ELEMENT_TYPE_FLOAT32


class LocalPeer:
    """One execution stream, its socket and its region. ``call``: the stream over gRPC."""

    def __init__(self, call: Any, offer: local_pb2.LocalOffer) -> None:
        self.call = call
        self.offer = offer
        self.peer = packets.new_socket()
        self.region = local_pb2.MemoryRegion()
        self.memory: mmap.mmap | None = None
        self.fd = -1
        self.file = -1
        """The answer that came with a region on the GPU."""
        self.plan: dict[str, Any] = {"plan_number": 0}
        """What layers name: the plan that was started last by the socket, and the pass."""

    @classmethod
    async def offered(cls, stub: Any, grant: tpb.SignedPayload) -> LocalPeer:
        """Open a stream as a caller on the same machine."""
        call = stub.Execute()
        opening = pb.OpenExecution(grant=grant, host_id=packets.host_id())
        await call.write(pb.ExecuteRequest(open=opening))
        opened = (await call.read()).opened
        assert len(opened.local.secret) == packets.SECRET_BYTES
        return cls(call, opened.local)

    @classmethod
    async def joined(cls, stub: Any, grant: tpb.SignedPayload) -> LocalPeer:
        """Open a stream and take its offer."""
        self = await cls.offered(stub, grant)
        answer = await self.join()
        assert answer.HasField("joined"), answer
        return self

    async def join(self, secret: bytes | None = None) -> pb.ExecuteResponse:
        """Connect and present the secret."""
        self.peer.connect(self.offer.socket_path)
        join = local_pb2.JoinExecution(secret=self.offer.secret if secret is None else secret)
        self.send(pb.ExecuteRequest(join=join).SerializeToString())
        await self._readable()
        packet, fds, _, _ = socket.recv_fds(self.peer, packets.MAX_PACKET_BYTES, 4)
        answer = pb.ExecuteResponse.FromString(packet)
        if fds:
            (self.fd,) = fds
            (self.region,) = answer.joined.regions
            self.memory = mmap.mmap(self.fd, self.region.size_bytes)
        return answer

    def send(self, packet: bytes) -> None:
        self.peer.send(packet, packets.NO_WAIT)

    async def ask(
        self,
        packet: bytes | None = None,
        *,
        plan: tpb.SignedPayload | None = None,
        pass_index: int | None = None,
        **message: Any,
    ) -> pb.ExecuteResponse:
        """Return the answer to a packet, or to a message; raises ConnectionError at the end. A
        layer is one of the plan that was started last.
        """
        if plan is not None:
            message["plan"] = pb.StartPlanRequest(plan=plan, pass_index=pass_index)
        if packet is None and "layer" in message:
            packet = self.packet(message["layer"])
        self.send(pb.ExecuteRequest(**message).SerializeToString() if packet is None else packet)
        answer = await self.answer()
        if answer.HasField("started"):
            number = answer.started.plan_number
            self.plan = {"plan_number": number, "pass_index": pass_index}
        return answer

    def packet(self, layer: pb.RunLayerRequest, **plan: Any) -> bytes:
        """Return a layer's message. ``plan``: what it names, if not the plan that was started
        last.
        """
        naming = pb.RunLayerRequest(**(plan or self.plan))
        naming.MergeFrom(layer)
        return pb.ExecuteRequest(layer=naming).SerializeToString()

    async def bind(self, layer: pb.RunLayerRequest) -> pb.ExecuteResponse:
        """Bind a layer by its own number. The answer is empty unless it is an error."""
        return await self._ask_bound(packets.BIND_LAYER, layer.layer, layer.SerializeToString())

    async def ask_bound(self, layer: int, **plan: Any) -> pb.ExecuteResponse:
        """Ask for a bound layer, whose tensors are in the region. ``plan``: as for ``packet``."""
        named = packets.named(**{"pass_index": None, **(plan or self.plan)})
        return await self._ask_bound(packets.LAYER, layer, named)

    async def _ask_bound(self, kind: int, binding: int, rest: bytes) -> pb.ExecuteResponse:
        head = packets.head_of(kind, binding)
        self.send(head + rest)
        packet = await self._receive()
        if packet == head:
            layer = pb.RunLayerResponse(layer=binding) if kind == packets.LAYER else None
            return pb.ExecuteResponse(output=layer)
        return pb.ExecuteResponse.FromString(packet)

    async def answer(self) -> pb.ExecuteResponse:
        return pb.ExecuteResponse.FromString(await self._receive())

    async def _receive(self) -> bytes:
        await self._readable()
        packet = self.peer.recv(packets.MAX_PACKET_BYTES)
        if not packet:
            raise ConnectionError("the data plane closed the socket")
        return packet

    async def share(self, cuda_device_uuid: str) -> pb.ExecuteResponse:
        """Ask for a region on the GPU, and keep its file open without opening the memory."""
        request = local_pb2.ShareDeviceMemory(cuda_device_uuid=cuda_device_uuid)
        self.send(pb.ExecuteRequest(share=request).SerializeToString())
        await self._readable()
        packet, files, _, _ = socket.recv_fds(self.peer, packets.MAX_PACKET_BYTES, 4)
        if files:
            (self.file,) = files
        return pb.ExecuteResponse.FromString(packet)

    async def ended(self) -> bool:
        """Return whether the data plane has closed the socket, or does soon."""
        try:
            await self.answer()
        except ConnectionError:
            return True
        return False

    def view(self, offset_bytes: int, *shape: int) -> torch.Tensor:
        """Return a float32 tensor in the region."""
        assert self.memory is not None
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(self.memory, dtype=torch.float32, count=count, offset=offset_bytes)
        return flat.view(shape)

    def layer(self, layer: int, num_tokens: int, seed: int = 0) -> pb.RunLayerRequest:
        """Return a layer's message; put tensors, of ``plan_author``'s layout, into the region."""
        request = pb.RunLayerRequest(layer=layer)
        for i, name in enumerate(("query", "key", "value")):
            tensor = tokens(num_tokens, 4 if name == "query" else 2, seed=seed + i)
            self.view(4096 * i, *tensor.shape).copy_(tensor)
            memory = tpb.MemoryRange(region_id=self.region.region_id, offset_bytes=4096 * i)
            message = tpb.Tensor(dtype=FLOAT32, shape=tensor.shape, memory=memory)
            getattr(request, name).CopyFrom(message)
        request.output.region_id = self.region.region_id
        request.output.offset_bytes = 4096 * 3
        return request

    def output(self, num_tokens: int) -> torch.Tensor:
        """Return the output that ``layer`` asks for."""
        return self.view(4096 * 3, num_tokens, 4, 16).clone()

    def close(self) -> None:
        self.peer.close()
        self.memory = None
        for fd in (self.fd, self.file):
            if fd >= 0:
                os.close(fd)
        self.fd = self.file = -1

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.peer.fileno(), ready.set)
        try:
            async with asyncio.timeout(10):
                await ready.wait()
        finally:
            loop.remove_reader(self.peer.fileno())


def error_of(answer: pb.ExecuteResponse) -> KvplaneError:
    """Return the error in an answer."""
    assert answer.WhichOneof("message") == "error", answer
    return from_wire(answer.error)


def plan_of_two_tokens(author: PlanAuthor, number: int = 1, session_id: int = 1) -> Any:
    """Return a plan of two tokens, in a block of its own for each session."""
    changes = [set_blocks(1, [(session_id - 1, 1)])] if number == 1 else []
    first = 2 * (number - 1)
    return author.plan(number, session_id, changes=changes, spans=[span(1, first, 2)])


def output_after(number: int) -> torch.Tensor:
    """Return the output of a layer of plan ``number``, each of two tokens and tensors of the seed
    ``100 * number``, after the plans before it.
    """
    seeds = [100 * n for n in range(1, number + 1)]
    key, value = (torch.cat([tokens(2, seed=seed + i) for seed in seeds]) for i in (1, 2))
    return dense_attention(tokens(2, 4, seed=seeds[-1]), key, value)


async def regions(server: DataPlaneServer, wanted: int) -> None:
    """Wait until the data plane has so many regions, and no more memory of them mapped."""
    async with asyncio.timeout(10):
        while server.local.num_regions != wanted or num_mapped() > 2 * wanted:
            await asyncio.sleep(0.01)


def forget_regions_of_others() -> None:
    """Collect regions as garbage that earlier tests left in the frames of errors that they
    expected.
    """
    if num_mapped():
        gc.collect()  # takes a second in a process that has run many tests
    assert num_mapped() == 0


def num_mapped() -> int:
    """Return the number of regions that this process has mapped, on either side."""
    return Path("/proc/self/maps").read_text().count("memfd:kvplane")
