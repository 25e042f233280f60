"""The services of sessions, pools and prefixes: they pass requests to the core and return its
answers.

All of it runs on one event loop, and a call into the core is never interrupted, so the core needs
no locks. Requests of several slices run one at a time, and between their slices other sessions are
served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, cast

import grpc.aio
from google.protobuf import duration_pb2

from control_plane.core import ControlPlane
from control_plane.server.metrics import ControlPlaneMetrics, counters_of
from control_plane.server.registration_server import Registrar
from control_plane.steps.answers import StepAnswer
from control_plane.steps.requests import Request
from kvplane import tracing
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.serving.callers.identity import caller, payer
from kvplane.serving.observability.logs import frames_of
from kvplane.serving.requests import Requests
from kvplane.serving.streams import RequestStreams, stopping_error
from kvplane.slices import Slices
from kvplane.v1 import pool_pb2 as pool_contract
from kvplane.v1 import prefix_pb2 as prefix_contract
from kvplane.v1 import session_pb2 as contract
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import pool_pb2, pool_pb2_grpc, prefix_pb2, prefix_pb2_grpc, session_pb2_grpc
from kvplane.wire.v1 import session_pb2 as pb

SESSIONS: Final = contract.DESCRIPTOR.services_by_name["SessionService"]
_LOGGER: Final = logging.getLogger(__name__)

_FAILED_WORK_DELAY_S: Final = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]


LARGE_REQUEST_BYTES: Final = 1 << 20
"""Size in bytes above which a request begins only after the long requests before it."""
TURNS_OF_A_CALL: Final = 2
"""Number of turns of the event loop that a call takes from its arrival to its answer."""
POOLS: Final = pool_contract.DESCRIPTOR.services_by_name["PoolService"]
PREFIX: Final = prefix_contract.DESCRIPTOR.services_by_name["PrefixService"]


class LongRequests:
    """Runs requests of several slices one at a time, in the order in which they came. After each
    slice, other calls get ``TURNS_OF_A_CALL`` turns of the event loop. A request that has begun
    runs to its end, even if its caller leaves; others are dropped with their caller, or a caller
    could pile up many.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        """``ended`` is called when a request has ended, even if its caller has gone."""
        self._ended = ended
        self._running: dict[int, asyncio.Task[Any]] = {}  # by session
        self._lane = asyncio.Lock()
        self._begun: int | None = None  # the session whose request has the lane

    def is_running(self, session_id: int) -> bool:
        """Return whether a request of the session waits or runs here."""
        return session_id in self._running

    async def wait(self, session_id: int) -> None:
        """Wait until the session has no request here: its requests run one after another."""
        while (task := self._running.get(session_id)) is not None:
            await asyncio.wait([task])

    async def run(self, session_id: int, slices: Slices[Any], *, has_begun: bool) -> Any:
        """Run the remaining slices of a request; returns or raises what they do. The session must
        have no other such request. ``has_begun``: whether a slice of it has run.
        """
        task = self._running[session_id] = asyncio.create_task(self._run(session_id, slices))
        # Not at the end of the task: one that is cancelled at once does not even begin.
        task.add_done_callback(partial(self._forget, session_id))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not has_begun and self._begun != session_id:
                task.cancel()
            raise

    async def _run(self, session_id: int, slices: Slices[Any]) -> Any:
        async with self._lane:
            self._begun = session_id
            try:
                return await _run_all(slices)
            finally:
                self._begun = None

    def _forget(self, session_id: int, task: asyncio.Task[Any]) -> None:
        del self._running[session_id]
        if not task.cancelled():
            task.exception()  # mark it as read: the caller may have gone
            self._ended()


async def _run_all(slices: Slices[Any]) -> Any:
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value
        for _ in range(TURNS_OF_A_CALL):
            await asyncio.sleep(0)


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """The gRPC service of engines: sessions, steps and aborts of one core."""

    def __init__(
        self, core: ControlPlane, registrar: Registrar, metrics: ControlPlaneMetrics
    ) -> None:
        self._core = core
        self._registrar = registrar
        self._metrics = metrics
        self._streams = RequestStreams("control plane")
        self._long = LongRequests(ended=self.flush)
        self._long_checks = asyncio.Lock()  # one at a time, or many would leave others little
        self._step_streams: dict[int, _StepStream] = {}  # by session, the latest
        self._notices: set[asyncio.Task[None]] = set()
        self._is_flush_due = False
        self._uncounted: list[tuple[StepAnswer, str, float]] = []

    def stop(self) -> None:
        """End streams that wait for a request now, the others after their current answer."""
        self._streams.stop()

    def flush(self) -> None:
        """Send the messages that the core has queued for data planes, and push news to sessions."""
        self._registrar.flush()
        for session_id, news in self._core.take_news():
            stream = self._step_streams.get(session_id)
            if stream is not None:
                pushed = pb.StreamStepsResponse(news=news)
                task = asyncio.create_task(stream.push(pushed))
                self._notices.add(task)
                task.add_done_callback(self._notices.discard)

    def _flush_soon(self) -> None:
        """Call ``flush`` once all answers of this turn of the event loop are written."""
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        self.flush()
        uncounted, self._uncounted = self._uncounted, []
        for answer, tenant, duration_s in uncounted:
            answer.settle()
            self._metrics.count_step(answer, tenant, duration_s)

    async def work(self) -> None:
        """Do the core's long work in slices, between requests. Runs until cancelled."""
        while True:
            await self._registrar.has_work.wait()
            self._registrar.has_work.clear()
            try:
                self._core.work()
                self.flush()
            except Exception as error:  # a bug; it must not stop this loop
                _LOGGER.error("background work failed error=%s", frames_of(error))
                await asyncio.sleep(_FAILED_WORK_DELAY_S)
            for _ in range(TURNS_OF_A_CALL):
                await asyncio.sleep(0)

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: _Context
    ) -> pb.OpenSessionResponse:
        opened = self._core.open_session(request, caller().tenant, idempotency_key(context))
        _LOGGER.info(
            "session opened id=%d pool=%r client=%r",
            opened.session.session_id,
            request.pool_id,
            request.client_name,
        )
        return opened

    async def RenewSession(
        self, request: pb.RenewSessionRequest, context: _Context
    ) -> pb.RenewSessionResponse:
        lease_s = self._core.renew_session(request.session, caller().tenant)
        time_to_live = duration_pb2.Duration()
        time_to_live.FromNanoseconds(int(lease_s * 1e9))
        return pb.RenewSessionResponse(time_to_live=time_to_live)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: _Context
    ) -> pb.CloseSessionResponse:
        await self._long.wait(request.session.session_id)
        self._core.close_session(request.session, caller().tenant)
        self.flush()
        _LOGGER.info("session closed id=%d", request.session.session_id)
        return pb.CloseSessionResponse()

    async def Step(self, request: pb.StepRequest, context: _Context) -> bytes:
        if request.validate_only:
            return (await self._validate(request, caller().tenant)).SerializeToString()
        answer = await self._step(request, caller().tenant)
        return answer.step

    async def StreamSteps(self, incoming: Requests, context: _Context) -> None:
        stream = _StepStream(context)
        try:
            while True:
                try:
                    message = await self._streams.next(incoming)
                except InvalidRequestError as error:  # it cannot be read; the next may be
                    await stream.write(self._refuse(0, error))
                    continue
                if message is None:
                    return
                kind = message.WhichOneof("message")
                if kind is None:
                    empty = InvalidRequestError("must be step or abort", field="message")
                    await stream.write(self._refuse(0, empty))
                    continue
                request = getattr(message, kind)
                answer: bytes | pb.StreamStepsResponse
                try:
                    if kind == "step":
                        if request.validate_only:
                            raise InvalidRequestError("is not for a stream", field="validate_only")
                        step = await self._step(request, caller().tenant, incoming.num_bytes)
                        answer = step.encoded
                    else:
                        aborted = await self.AbortPlans(request, context)
                        answer = pb.StreamStepsResponse(number=request.number, abort=aborted)
                except KvplaneError as error:
                    await stream.write(self._refuse(request.number, error))
                    continue
                session_id = request.session.session_id
                if self._step_streams.get(session_id) is not stream:
                    stream.session_ids.add(session_id)
                    self._step_streams[session_id] = stream
                await stream.write(answer)
        finally:
            for session_id in stream.session_ids:
                if self._step_streams.get(session_id) is stream:
                    del self._step_streams[session_id]

    async def AbortPlans(
        self, request: pb.AbortPlansRequest, context: _Context
    ) -> pb.AbortPlansResponse:
        response = await self._run(request, caller().tenant)
        if request.whole_tables:
            self._metrics.num_plans += 1
        return cast(pb.AbortPlansResponse, response)

    async def ListSequences(
        self, request: pb.ListSequencesRequest, context: _Context
    ) -> pb.ListSequencesResponse:
        return self._core.list_sequences(request, caller().tenant)

    async def _validate(self, request: pb.StepRequest, tenant: str) -> pb.StepResponse:
        """Return what a step would be answered now, without changing anything."""
        slices = self._core.validate(request, tenant)
        session_id = request.session.session_id
        await self._long.wait(session_id)
        try:
            next(slices)
            while True:
                await self._long.wait(session_id)
                async with self._long_checks:  # for a slice only: others take turns with it
                    for _ in range(TURNS_OF_A_CALL):
                        await asyncio.sleep(0)
                    if not self._long.is_running(session_id):
                        next(slices)
        except StopIteration as end:
            return cast(pb.StepResponse, end.value)

    def _refuse(self, number: int, error: KvplaneError) -> pb.StreamStepsResponse:
        self._metrics.rpc.rejected.inc(error.reason)
        # As of the request by itself: the message around it is the stream's.
        error.field = error.field.removeprefix("step.").removeprefix("abort.")
        return pb.StreamStepsResponse(number=number, error=to_wire(error))

    async def _step(
        self, request: pb.StepRequest, tenant: str, num_bytes: int | None = None
    ) -> StepAnswer:
        """Run a step and return its answer. ``num_bytes``: of the request, if known."""
        begin = time.perf_counter()
        with tracing.span(
            "kvplane.control_plane.step",
            request.traceparent,
            "SERVER",
            session=request.session.session_id,
            number=request.number,
        ):
            answer: StepAnswer = await self._run(request, tenant, num_bytes)
        self._uncounted.append((answer, tenant, time.perf_counter() - begin))
        return answer

    async def _run(self, request: Request, tenant: str, num_bytes: int | None = None) -> Any:
        """Run a numbered request after its session's earlier ones; returns the core's answer.
        ``num_bytes``: of the request, if known.
        """
        if num_bytes is None:
            num_bytes = request.ByteSize()  # protobuf encodes the request to find it
        session_id = request.session.session_id
        if self._long.is_running(session_id):
            await self._long.wait(session_id)
        try:
            slices = self._core.run(request, tenant)
            has_begun = num_bytes <= LARGE_REQUEST_BYTES
            if has_begun:
                try:
                    next(slices)
                except StopIteration as end:
                    return end.value
            return await self._long.run(session_id, slices, has_begun=has_begun)
        finally:  # a request that failed as a whole may have applied its receipts
            self._flush_soon()


def idempotency_key(context: _Context) -> str:
    """Return the call's metadata ``idempotency-key``; empty if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "idempotency-key":
            return str(value)
    return ""


class _StepStream:
    """A StreamSteps stream, on which answers are written and news are pushed."""

    def __init__(self, context: _Context) -> None:
        self.session_ids: set[int] = set()
        self._context = context
        self._lock = asyncio.Lock()

    async def write(self, response: pb.StreamStepsResponse | bytes) -> None:
        """Write a message, encoded or not, after those that are being written."""
        await self._lock.acquire()  # `async with` would make two coroutines more for each answer
        try:
            await self._context.write(response)
        finally:
            self._lock.release()

    async def push(self, news: pb.StreamStepsResponse) -> None:
        """Push a session's news on its stream, as a hint that may be lost with the stream."""
        with contextlib.suppress(Exception):
            await self.write(news)


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    """The gRPC service that lists pools and sessions of one core."""

    def __init__(self, core: ControlPlane) -> None:
        self._core = core

    async def ListPools(
        self, request: pool_pb2.ListPoolsRequest, context: _Context
    ) -> pool_pb2.ListPoolsResponse:
        return self._core.list_pools(request)

    async def GetPool(
        self, request: pool_pb2.GetPoolRequest, context: _Context
    ) -> pool_pb2.GetPoolResponse:
        return self._core.get_pool(request.pool_id)

    async def GetPoolCounters(
        self, request: pool_pb2.GetPoolCountersRequest, context: _Context
    ) -> pool_pb2.GetPoolCountersResponse:
        observed = self._core.observe_pool(request.pool_id)
        return pool_pb2.GetPoolCountersResponse(counters=counters_of(observed))

    async def ListSessions(
        self, request: pool_pb2.ListSessionsRequest, context: _Context
    ) -> pool_pb2.ListSessionsResponse:
        return self._core.list_sessions(request, caller().tenant)


class PrefixService(prefix_pb2_grpc.PrefixServiceServicer):
    """The gRPC service that finds, retains, forgets and watches the cached prefixes of one core.

    A watcher of an index is woken when it has changed, and takes the changes when its stream has
    room again; see ``control_plane.watching``.
    """

    def __init__(self, core: ControlPlane, flush: Callable[[], None]) -> None:
        """``flush`` sends the messages that the core has queued for data planes and sessions."""
        self._core = core
        self._flush = flush
        self._wakes: set[asyncio.Event] = set()
        self._stopping = False
        self._searching = asyncio.Lock()  # one at a time, or many would leave others little

    def stop(self) -> None:
        """End all watchers' streams; their clients reconnect to the next control plane."""
        self._stopping = True
        for changed in self._wakes:
            changed.set()

    async def FindPrefix(
        self, request: prefix_pb2.FindPrefixRequest, context: _Context
    ) -> prefix_pb2.FindPrefixResponse:
        slices = self._core.find_prefix(request, caller().tenant)
        try:
            next(slices)
            while True:
                async with self._searching:  # for a slice only: others take turns with it
                    for _ in range(TURNS_OF_A_CALL):
                        await asyncio.sleep(0)
                    next(slices)
        except StopIteration as end:
            return cast(prefix_pb2.FindPrefixResponse, end.value)

    async def RetainPrefix(
        self, request: prefix_pb2.RetainPrefixRequest, context: _Context
    ) -> prefix_pb2.RetainPrefixResponse:
        return self._core.retain_prefix(request, caller().tenant, idempotency_key(context))

    async def ForgetPrefixes(
        self, request: prefix_pb2.ForgetPrefixesRequest, context: _Context
    ) -> prefix_pb2.ForgetPrefixesResponse:
        response = self._core.forget_prefixes(request, caller().tenant, idempotency_key(context))
        self._flush()
        return response

    async def WatchPrefixes(
        self, request: prefix_pb2.WatchPrefixesRequest, context: _Context
    ) -> AsyncIterator[prefix_pb2.WatchPrefixesResponse]:
        """Serve one watcher until it leaves. Raises what ``ControlPlane.watch`` and
        ``Watcher.take`` raise, and PlaneUnavailableError when the control plane stops.
        """
        changed = asyncio.Event()
        watcher = self._core.watch(request, caller().tenant, changed.set, payer())
        self._wakes.add(changed)
        try:
            while not self._stopping:
                changed.clear()
                while (response := watcher.take()) is not None:
                    yield response
                await changed.wait()
            raise stopping_error("control plane")
        finally:
            self._wakes.remove(changed)
            self._core.unwatch(watcher)
