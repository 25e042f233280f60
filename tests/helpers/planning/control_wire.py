"""The control plane's peers, a data plane and an engine, simulated by hand on raw stubs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from kvplane import ops
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2, registration_pb2_grpc
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import (
    execution_pb2_grpc,
    pool_pb2_grpc,
    prefix_pb2_grpc,
    session_pb2_grpc,
)
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, hello, receipt, report

PATIENCE_S = 30.0

Stub = Any  # grpc generates no types for stubs


def stub_of(channel: grpc.aio.Channel | grpc.Channel) -> Stub:
    """Return the methods of all services of both planes."""
    stubs: list[Any] = [
        session_pb2_grpc.SessionServiceStub(channel),
        pool_pb2_grpc.ServerServiceStub(channel),
        pool_pb2_grpc.PoolServiceStub(channel),
        prefix_pb2_grpc.PrefixServiceStub(channel),
        registration_pb2_grpc.RegistrationServiceStub(channel),
        execution_pb2_grpc.ExecutionServiceStub(channel),
        execution_pb2_grpc.BlockServiceStub(channel),
    ]
    return SimpleNamespace(**{name: call for stub in stubs for name, call in vars(stub).items()})


class RawShard:
    """A data plane's end of a registration stream. It runs no plan, but signs receipts."""

    def __init__(self, stub: Stub, **fields: Any) -> None:
        """``fields``: of its Hello."""
        self.hello = hello(**fields)
        self.key = b""
        self.welcome = rpb.Welcome()
        self.call: Any = stub.Register()

    @classmethod
    async def joined(cls, stub: Stub, **fields: Any) -> RawShard:
        """Return one that has registered and reported nothing."""
        shard = cls(stub, **fields)
        await shard.register()
        await shard.report()
        return shard

    async def register(self) -> rpb.Welcome:
        """Send Hello and wait for the Welcome."""
        await self.send(hello=self.hello)
        answer = await self.receive()
        assert answer.WhichOneof("message") == "welcome"
        self.welcome = answer.welcome
        self.key = self.welcome.key or self.key
        return self.welcome

    async def report(self, part: rpb.BlockReport | None = None) -> None:
        """Report, and after the last part wait for its acceptance."""
        part = part or report()
        await self.send(report=part)
        if part.last:
            answer = await self.receive()
            assert answer.WhichOneof("message") == "report_accepted"

    async def send(self, **message: Any) -> None:
        await self.call.write(rpb.RegisterRequest(**message))

    async def receive(self, patience_s: float = PATIENCE_S) -> rpb.RegisterResponse:
        """Return the next message. Raises grpc.aio.AioRpcError if an error ended the stream."""
        answer = await asyncio.wait_for(self.call.read(), patience_s)
        if answer is grpc.aio.EOF:
            await asyncio.wait_for(self.call, patience_s)
            raise EOFError
        assert isinstance(answer, rpb.RegisterResponse)
        return answer

    async def published(self, num_blocks: int) -> plan_pb2.Publications:
        """Return the next publications, which must be of ``num_blocks`` blocks."""
        publications = (await self.receive()).publish.publications
        assert columns.count(columns.INT32, publications.indices) == num_blocks
        return publications

    async def failure(self) -> grpc.aio.AioRpcError:
        """Return the error that ends the stream, whatever comes before."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while True:
                await self.receive()
        return error.value

    def hang_up(self) -> None:
        self.call.cancel()

    def receipt(self, plan: tpb.SignedPayload, **changes: Any) -> tpb.SignedPayload:
        """Return its receipt for ``plan``."""
        return receipt(self.key, plan, self.hello, **changes)


class RawSession:
    """An engine's end: it numbers its requests, and counts every plan as run."""

    def __init__(self, stub: Stub, shard: RawShard, opened: pb.OpenSessionResponse) -> None:
        self.stub = stub
        self.shard = shard
        self.opened = opened
        self.ref = opened.session
        self.number = 0
        self.receipts: list[tpb.SignedPayload] = []

    @classmethod
    async def open(cls, stub: Stub, shard: RawShard, **fields: Any) -> RawSession:
        request = pb.OpenSessionRequest(
            pool_id=shard.hello.pool_id,
            layout=tpb.Layout(fingerprint=LAYOUT.fingerprint),
            client_name="test",
            **fields,
        )
        return cls(stub, shard, await stub.OpenSession(request))

    def next(self) -> dict[str, Any]:
        """Return the fields of the next numbered request, with the receipts that are due."""
        self.number += 1
        receipts, self.receipts = self.receipts, []
        return {"session": self.ref, "number": self.number, "receipts": receipts}

    def ran(self, answer: Any) -> Any:
        """Count the answer's plan, if it has one, as run. Return ``answer``."""
        if answer.HasField("plan"):
            self.receipts.append(self.shard.receipt(answer.plan))
        return answer

    async def step(self, *operations: pb.Operation, **fields: Any) -> pb.StepResponse:
        """Send the next step, by a unary call. Its plan counts as run."""
        step = pb.StepRequest(**{**self.next(), "operations": operations, **fields})
        answer = await self.stub.Step(step)
        assert isinstance(answer, pb.StepResponse)
        return self.ran(answer)  # type: ignore[no-any-return]

    async def admit(self, sequence_id: int, tokens: list[int], **more: Any) -> pb.StepResponse:
        """Send a step that admits one sequence, which must succeed."""
        result = await self.step(ops.admit(sequence_id, tokens, **more))
        assert not result.results[0].failures
        return result

    async def submit(self) -> pb.StepResponse:
        """Submit the receipts that are due."""
        answer = await self.stub.Step(pb.StepRequest(**self.next()))
        assert isinstance(answer, pb.StepResponse)
        return answer

    async def look_at(
        self, sequence_id: int, *, with_tables: bool = False
    ) -> pb.ListSequencesResponse:
        """Return the state of a sequence, and its tables."""
        ids = columns.pack(INT64, [sequence_id])
        request = pb.ListSequencesRequest(
            session=self.ref, sequence_ids=ids, with_tables=with_tables
        )
        answer = await self.stub.ListSequences(request)
        assert isinstance(answer, pb.ListSequencesResponse)
        return answer

    async def num_written(self, sequence_id: int) -> int:
        """Return the tokens of the sequence that are written, by receipts."""
        states = (await self.look_at(sequence_id)).sequences
        [num] = columns.read(INT32, states.num_written_tokens, "num_written_tokens")
        return num
