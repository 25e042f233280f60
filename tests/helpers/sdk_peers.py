"""Peers for the client's tests: servers that answer as a test says, over a real socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from kvplane.layout import LayerGroup, Layout
from kvplane.plane.v1 import registration_pb2
from kvplane.serving.callers.access import AccessList
from kvplane.serving.callers.identity import Gate, caller
from kvplane.serving.certificates import ServerCertificate, ServerTls
from kvplane.serving.interceptor import ErrorInterceptor
from kvplane.serving.limits.receive_budget import ReceiveBudget
from kvplane.serving.observability.metrics import RpcMetrics
from kvplane.serving.requests import Admission
from kvplane.serving.server import build
from kvplane.v1 import execution_pb2, pool_pb2, prefix_pb2, session_pb2
from kvplane.wire.plane.v1 import registration_pb2_grpc
from kvplane.wire.plane.v1.plan_pb2 import Plan
from kvplane.wire.v1 import execution_pb2 as dpb
from kvplane.wire.v1 import execution_pb2_grpc, pool_pb2_grpc, prefix_pb2_grpc, session_pb2_grpc
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1.types_pb2 import SessionRef, SignedPayload

LAYOUT = Layout("m", 16, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))

SESSION = SessionRef(incarnation=5, session_id=2**53 - 1)


class Hangup(Exception):
    """Raised by a script: the call breaks as if the connection did."""


class ScriptedControlPlane(
    session_pb2_grpc.SessionServiceServicer,
    pool_pb2_grpc.PoolServiceServicer,
    prefix_pb2_grpc.PrefixServiceServicer,
):
    """Answers every request with what ``script(request)`` returns, and remembers the requests.
    A script may return several answers to a request of a stream.

    ``streams``: how many Step streams were opened.
    """

    def __init__(self, time_to_live_s: float = 30.0) -> None:
        self.requests: list[Any] = []
        self.renewals: list[SessionRef] = []
        self.streams = 0
        self.script: Callable[[Any], Any] = answer_step
        self._time_to_live_s = time_to_live_s

    @property
    def numbers(self) -> list[int]:
        return [request.number for request in self.requests]

    async def OpenSession(self, request: cpb.OpenSessionRequest, context: Any) -> Any:
        response = cpb.OpenSessionResponse(
            session=SESSION,
            max_plans_in_flight=4,
            grant=payload(b"grant"),
        )
        response.time_to_live.FromMilliseconds(int(self._time_to_live_s * 1000))
        return response

    async def RenewSession(self, request: cpb.RenewSessionRequest, context: Any) -> Any:
        self.renewals.append(request.session)
        return cpb.RenewSessionResponse()

    async def CloseSession(self, request: cpb.CloseSessionRequest, context: Any) -> Any:
        return cpb.CloseSessionResponse()

    async def StreamSteps(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        async for message in requests:
            request = message.step
            answer = await self._answer(request, context)
            for response in answer if isinstance(answer, list) else [answer]:
                yield response

    async def AbortPlans(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    ListSequences = GetPool = AbortPlans

    async def WatchPrefixes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        for response in self.script(request):
            if isinstance(response, Exception):
                raise response
            yield response

    async def _answer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return await answered(self.script, request, context)


def add_services(plane: Any, server: grpc.aio.Server) -> None:
    """Serve the services whose servicers ``plane`` derives from."""
    for base in type(plane).__mro__:
        if base.__name__.endswith("Servicer"):
            add = getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server")
            add(plane, server)


def interceptor() -> ErrorInterceptor:
    """Return the interceptor of a server without an access list."""
    files = (session_pb2, pool_pb2, prefix_pb2, execution_pb2, registration_pb2)
    services = [each for file in files for each in file.DESCRIPTOR.services_by_name.values()]
    admission = Admission(Gate(AccessList(None), services), {}, ReceiveBudget())
    return ErrorInterceptor(RpcMetrics(), admission)


@asynccontextmanager
async def serving(plane: Any, tls: ServerTls | None = None) -> AsyncIterator[str]:
    """Serve ``plane`` on a loopback port; yield its address."""
    certificate = tls and ServerCertificate(tls)
    server = build(
        "127.0.0.1:0", tls=certificate, max_message_bytes=1 << 20, interceptors=[interceptor()]
    )
    add_services(plane, server.grpc_server)
    await server.start([])
    yield server.address
    await server.stop(0)


class WhoAmI(
    session_pb2_grpc.SessionServiceServicer,
    registration_pb2_grpc.RegistrationServiceServicer,
    pool_pb2_grpc.PoolServiceServicer,
):
    """Tells the tenant that it takes the caller for, and ends each registration."""

    def __init__(self) -> None:
        self.registered: list[str] = []

    async def ListPools(self, request: Any, context: Any) -> pool_pb2.ListPoolsResponse:
        return pool_pb2.ListPoolsResponse(pool_ids=[caller().tenant])

    async def Register(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await anext(aiter(requests))
        self.registered.append(caller().tenant)
        for never in ():
            yield never


class ScriptedDataPlane(
    execution_pb2_grpc.ExecutionServiceServicer, execution_pb2_grpc.BlockServiceServicer
):
    """Works as ScriptedControlPlane; answers to requests of a stream are always lists."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.script: Callable[[Any], Any] = answer_execution

    @property
    def kinds(self) -> list[str]:
        """The kinds of messages that came on streams, in order."""
        return [request.WhichOneof("message") for request in self.requests]

    async def Execute(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            for answer in await self._answer(request, context):
                yield answer

    async def _answer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return await answered(self.script, request, context)


async def answered(script: Callable[[Any], Any], request: Any, context: Any) -> Any:
    try:
        answer = script(request)
        return await answer if hasattr(answer, "__await__") else answer
    except Hangup:
        await abort(context)


async def abort(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


# Scripts


def hang_up(request: Any) -> Any:
    raise Hangup


async def never(request: Any) -> Any:
    await asyncio.sleep(60)


def raises(error: Exception) -> Callable[[Any], Any]:
    """Return a script that raises an error."""

    def script(request: Any) -> Any:
        raise error

    return script


def in_turn(*scripts: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a script that does one of ``scripts`` with each request, and answers further ones."""
    waiting = [*scripts]
    return lambda request: (waiting.pop(0) if waiting else answer_step)(request)


def answer_step(request: Any) -> Any:
    """Return an answer whose plan holds the request's number."""
    plan = plan_of(request.number)
    if isinstance(request, cpb.AbortPlansRequest):
        return cpb.AbortPlansResponse(plan=plan if request.whole_tables else None)
    step = cpb.StepResponse(plan=plan if request.operations else None)
    return cpb.StreamStepsResponse(number=request.number, step=step)


def answer_execution(request: Any) -> Any:
    """Answer layers 0 to 2 of plans of two tokens; a layer's output is its query."""
    kind = request.WhichOneof("message")
    if kind == "open":
        opened = dpb.ExecutionOpened(layers=[0, 1, 2])
        return [dpb.ExecuteResponse(opened=opened)]
    if kind == "plan":
        number = Plan.FromString(request.plan.plan.payload).number
        started = dpb.StartPlanResponse(plan_number=number, num_tokens=2)
        return [dpb.ExecuteResponse(started=started)]
    output = dpb.RunLayerResponse(layer=request.layer.layer, output=request.layer.query)
    if request.layer.layer == 2:
        output.receipt.CopyFrom(payload(b"receipt"))
    return [dpb.ExecuteResponse(output=output)]


def plan_of(number: int) -> SignedPayload:
    return payload(Plan(number=number).SerializeToString())


def payload(content: bytes) -> SignedPayload:
    return SignedPayload(type="t", payload=content, signature=b"s")
