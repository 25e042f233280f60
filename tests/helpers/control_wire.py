"""The far ends of the control plane's wires, played by hand on raw stubs: a data plane's and an
engine's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from kvplane import ops, protocol, signing
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb

LAYOUT = Layout("test-model", 8, "float32", "float32", (LayerGroup("full", (0, 1), 2, 8),))
PATIENCE_S = 10.0

Stub = Any  # a ControlPlaneServiceStub; grpc generates no types for it


class RawShard:
    """A data plane's end of the registration wire. It runs no plan, but can say that one ran."""

    def __init__(self, stub: Stub, **hello: Any) -> None:
        defaults = {
            "protocol": protocol.supported(),
            "pool_id": "pool",
            "shard": tpb.Shard(num_shards=1, num_layers=2, num_kv_heads=2),
            "epoch": 11,
            "layout": LAYOUT.to_proto(),
            "num_device_blocks": 16,
            "num_host_blocks": 8,
            "address": "127.0.0.1:1",
        }
        self.hello = pb.Hello(**{**defaults, **hello})
        self.welcome = pb.Welcome()
        self.call: Any = stub.Register()

    async def register(self) -> pb.Welcome:
        """Say Hello and wait for the Welcome."""
        await self.send(hello=self.hello)
        answer = await self.receive()
        assert answer.WhichOneof("message") == "welcome"
        self.welcome = answer.welcome
        return self.welcome

    async def report(
        self, *blocks: pb.ReportedBlock, last: bool = True, max_session_id: int = 0
    ) -> None:
        """Report, and after the last part wait for its acceptance."""
        report = pb.BlockReport(blocks=blocks, last=last, max_session_id=max_session_id)
        await self.send(report=report)
        if last:
            answer = await self.receive()
            assert answer.WhichOneof("message") == "report_accepted"

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.RegisterRequest(**message))

    async def receive(self, patience_s: float = PATIENCE_S) -> pb.RegisterResponse:
        """The next message. Raises grpc.aio.AioRpcError when the stream ended with an error."""
        answer = await asyncio.wait_for(self.call.read(), patience_s)
        if answer is grpc.aio.EOF:
            await asyncio.wait_for(self.call, patience_s)
            raise EOFError
        assert isinstance(answer, pb.RegisterResponse)
        return answer

    async def failure(self) -> grpc.aio.AioRpcError:
        """What the stream ends with, whatever comes before."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while True:
                await self.receive()
        return error.value

    def hang_up(self) -> None:
        self.call.cancel()

    def receipt(self, plan: tpb.SignedPayload, **changes: Any) -> tpb.SignedPayload:
        """Its word that ``plan`` has run."""
        what = tpb.Plan.FromString(plan.payload)
        fields = {
            "pool_id": what.pool_id,
            "shard_index": self.hello.shard.index,
            "epoch": self.hello.epoch,
            "incarnation": what.incarnation,
            "session_id": what.session_id,
            "plan_number": what.number,
            "plan_digest": signing.digest(plan.payload),
        }
        payload = tpb.Receipt(**{**fields, **changes}).SerializeToString()
        signature = signing.sign(self.welcome.key, signing.RECEIPT, payload)
        return tpb.SignedPayload(type=signing.RECEIPT, payload=payload, signature=signature)


class RawSession:
    """An engine's end: it counts its steps, and trusts the shard to have run every plan."""

    def __init__(self, stub: Stub, shard: RawShard, opened: pb.OpenSessionResponse) -> None:
        self.stub = stub
        self.shard = shard
        self.opened = opened
        self.id = opened.session_id
        self.number = 0
        self.receipts: list[tpb.SignedPayload] = []

    @classmethod
    async def open(cls, stub: Stub, shard: RawShard) -> RawSession:
        request = pb.OpenSessionRequest(
            pool_id=shard.hello.pool_id,
            protocol=protocol.supported(),
            layout=tpb.Layout(fingerprint=LAYOUT.fingerprint),
            client_name="test",
        )
        return cls(stub, shard, await stub.OpenSession(request))

    def next(self) -> dict[str, Any]:
        """The fields of the next numbered request, with the receipts that are due."""
        self.number += 1
        receipts, self.receipts = self.receipts, []
        return {"session_id": self.id, "number": self.number, "receipts": receipts}

    def ran(self, answer: Any) -> Any:
        """Take it that the answer's plan, if it has one, has run. Returns ``answer``."""
        if answer.HasField("plan"):
            self.receipts.append(self.shard.receipt(answer.plan))
        return answer

    async def admit(self, sequence_id: int, tokens: list[int], **more: Any) -> pb.AdmitResponse:
        operation = ops.admit(sequence_id, tokens, **more).admit
        answer = await self.stub.Admit(pb.AdmitRequest(operation=operation, **self.next()))
        assert isinstance(answer, pb.AdmitResponse)
        return answer

    async def submit(self) -> pb.SubmitReceiptsResponse:
        """Hand in the receipts that are due."""
        receipts, self.receipts = self.receipts, []
        request = pb.SubmitReceiptsRequest(session_id=self.id, receipts=receipts)
        answer = await self.stub.SubmitReceipts(request)
        assert isinstance(answer, pb.SubmitReceiptsResponse)
        return answer
