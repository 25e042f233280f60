"""The gRPC face of the control plane: each call is checked, run by the core, answered. The core
does the thinking.

All of it runs on one event loop, and a call into the core is never interrupted, so the core needs
no locks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from control_plane.planning.core import ControlPlane
from control_plane.planning.model import OperationResult, Status, StepOutcome
from control_plane.server import codec
from control_plane.server.metrics import ControlPlaneMetrics
from control_plane.server.registration_server import Registrar
from kvplane import protocol
from kvplane.error_codec import to_wire
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    PoolFullError,
)
from kvplane.serving.identity import tenant_of
from kvplane.serving.streams import RequestStreams
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import control_pb2_grpc

SERVICE: Final = pb.DESCRIPTOR.services_by_name["ControlPlaneService"].full_name
_LOGGER: Final = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_OneOperation = (
    pb.AdmitRequest
    | pb.AppendRequest
    | pb.ForkRequest
    | pb.FreeRequest
    | pb.SwapOutRequest
    | pb.SwapInRequest
)


class ControlPlaneService(control_pb2_grpc.ControlPlaneServiceServicer):
    """Serves one core."""

    def __init__(
        self, core: ControlPlane, registrar: Registrar, metrics: ControlPlaneMetrics, version: str
    ) -> None:
        self._core = core
        self._registrar = registrar
        self._metrics = metrics
        self._version = version
        self._streams = RequestStreams("control plane")

    def stop(self) -> None:
        """End the streams that wait for a request, and each other one after its present answer."""
        self._streams.stop()
        self._registrar.stop()

    async def DescribeControlPlane(
        self, request: pb.DescribeControlPlaneRequest, context: _Context
    ) -> pb.DescribeControlPlaneResponse:
        return pb.DescribeControlPlaneResponse(
            protocol=protocol.supported(),
            incarnation=self._core.incarnation,
            version=self._version,
        )

    async def ListPools(
        self, request: pb.ListPoolsRequest, context: _Context
    ) -> pb.ListPoolsResponse:
        return pb.ListPoolsResponse(pool_ids=sorted(self._core.list_pools()))

    async def DescribePool(
        self, request: pb.DescribePoolRequest, context: _Context
    ) -> pb.DescribePoolResponse:
        pool_id = codec.require_name(request.pool_id, "pool_id")
        return codec.pool_to_proto(self._core.describe_pool(pool_id))

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: _Context
    ) -> pb.OpenSessionResponse:
        version = protocol.negotiate(request.protocol)
        pool_id = codec.require_name(request.pool_id, "pool_id")
        client_name = codec.require_name(request.client_name, "client_name", may_be_empty=True)
        fingerprint = codec.layout_fingerprint(request.layout)
        opened = self._core.open_session(pool_id, fingerprint, tenant_of(context), client_name)
        _LOGGER.info(
            "session opened id=%d pool=%r client=%r", opened.session_id, pool_id, client_name
        )
        return codec.opened_to_proto(opened, version)

    async def RenewSession(
        self, request: pb.RenewSessionRequest, context: _Context
    ) -> pb.RenewSessionResponse:
        time_to_live_s = self._core.renew_session(request.session_id, tenant_of(context))
        return pb.RenewSessionResponse(time_to_live=codec.duration(time_to_live_s))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: _Context
    ) -> pb.CloseSessionResponse:
        self._core.close_session(request.session_id, tenant_of(context))
        self._registrar.flush()
        _LOGGER.info("session closed id=%d", request.session_id)
        return pb.CloseSessionResponse()

    async def Step(
        self, request_iterator: AsyncIterator[pb.StepRequest], context: _Context
    ) -> AsyncIterator[pb.StepResponse]:
        tenant = tenant_of(context)
        while True:
            try:
                request = await self._streams.next(request_iterator)
            except InvalidRequestError as error:  # no StepRequest at all; the next may be one
                yield self._refuse(0, error)
                continue
            if request is None:
                return
            yield self._answer(request, tenant)

    async def Admit(self, request: pb.AdmitRequest, context: _Context) -> pb.AdmitResponse:
        done = self._run_one(request, pb.Operation(admit=request.operation), context)
        return pb.AdmitResponse(result=done.results[0].admit, **_plan_and_usage(done))

    async def Append(self, request: pb.AppendRequest, context: _Context) -> pb.AppendResponse:
        done = self._run_one(request, pb.Operation(append=request.operation), context)
        return pb.AppendResponse(result=done.results[0].append, **_plan_and_usage(done))

    async def Fork(self, request: pb.ForkRequest, context: _Context) -> pb.ForkResponse:
        done = self._run_one(request, pb.Operation(fork=request.operation), context)
        return pb.ForkResponse(result=done.results[0].fork, **_plan_and_usage(done))

    async def Free(self, request: pb.FreeRequest, context: _Context) -> pb.FreeResponse:
        done = self._run_one(request, pb.Operation(free=request.operation), context)
        return pb.FreeResponse(result=done.results[0].free, **_plan_and_usage(done))

    async def SwapOut(self, request: pb.SwapOutRequest, context: _Context) -> pb.SwapOutResponse:
        done = self._run_one(request, pb.Operation(swap_out=request.operation), context)
        return pb.SwapOutResponse(result=done.results[0].swap_out, **_plan_and_usage(done))

    async def SwapIn(self, request: pb.SwapInRequest, context: _Context) -> pb.SwapInResponse:
        done = self._run_one(request, pb.Operation(swap_in=request.operation), context)
        return pb.SwapInResponse(result=done.results[0].swap_in, **_plan_and_usage(done))

    async def SubmitReceipts(
        self, request: pb.SubmitReceiptsRequest, context: _Context
    ) -> pb.SubmitReceiptsResponse:
        step = pb.StepRequest(
            session_id=request.session_id,
            receipts=request.receipts,
            late_tokens=request.late_tokens,
        )
        outcome = self._run(step, tenant_of(context))
        return pb.SubmitReceiptsResponse(usage=codec.usage_to_proto(outcome.usage))

    async def AbortPlan(
        self, request: pb.AbortPlanRequest, context: _Context
    ) -> pb.AbortPlanResponse:
        states = self._core.abort_plan(request.session_id, tenant_of(context), request.plan_number)
        self._registrar.flush()
        return pb.AbortPlanResponse(sequences=map(codec.sequence_to_proto, states))

    async def Resync(self, request: pb.ResyncRequest, context: _Context) -> pb.ResyncResponse:
        outcome = self._core.resync(
            request.session_id,
            tenant_of(context),
            request.number,
            content=codec.resync_digest(request),
        )
        self._registrar.flush()
        self._metrics.plans.inc()
        return pb.ResyncResponse(
            sequences=map(codec.sequence_to_proto, outcome.sequences),
            plan=codec.sealed_to_proto(outcome.plan),
        )

    async def GetBlockTable(
        self, request: pb.GetBlockTableRequest, context: _Context
    ) -> pb.GetBlockTableResponse:
        blocks, num_tokens = self._core.block_table(
            request.session_id, tenant_of(context), request.sequence_id
        )
        return pb.GetBlockTableResponse(
            tables=[codec.blocks_to_proto(blocks)], num_tokens=num_tokens
        )

    async def LookupPrefix(
        self, request: pb.LookupPrefixRequest, context: _Context
    ) -> pb.LookupPrefixResponse:
        found = self._core.lookup_prefix(request.session_id, tenant_of(context), request.token_ids)
        return pb.LookupPrefixResponse(
            num_cached_tokens=found.num_cached_tokens, hashes=found.hashes
        )

    async def DescribeSequence(
        self, request: pb.DescribeSequenceRequest, context: _Context
    ) -> pb.DescribeSequenceResponse:
        state = self._core.describe_sequence(
            request.session_id, tenant_of(context), request.sequence_id
        )
        return pb.DescribeSequenceResponse(sequence=codec.sequence_to_proto(state))

    def Register(
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: _Context
    ) -> AsyncIterator[pb.RegisterResponse]:
        return self._registrar.serve(request_iterator)

    def _answer(self, request: pb.StepRequest, tenant: str) -> pb.StepResponse:
        number = request.number
        try:
            outcome = self._run(request, tenant)
        except KvplaneError as error:
            return self._refuse(number, error)
        return pb.StepResponse(number=number, result=codec.step_result_to_proto(outcome))

    def _refuse(self, number: int, error: KvplaneError) -> pb.StepResponse:
        self._metrics.rpc.rejected.labels(error.reason).inc()
        return pb.StepResponse(number=number, error=to_wire(error))

    def _run_one(
        self, request: _OneOperation, operation: pb.Operation, context: _Context
    ) -> pb.StepResult:
        """Run a step of one operation. Raises why the operation was not done."""
        if not request.HasField("operation"):
            raise InvalidRequestError("is missing", field="operation")
        if request.number < 1:
            raise InvalidRequestError("must be at least 1", field="number")
        step = pb.StepRequest(
            session_id=request.session_id,
            number=request.number,
            operations=[operation],
            receipts=request.receipts,
        )
        try:
            outcome = self._run(step, tenant_of(context), atomic=True)
            _require_ok(outcome.results[0])
        except KvplaneError as error:
            raise codec.of_one_operation(error) from error
        return codec.step_result_to_proto(outcome)

    def _run(self, request: pb.StepRequest, tenant: str, *, atomic: bool = False) -> StepOutcome:
        """Run a step, or what a unary call makes one of. Takes the receipts out of ``request``."""
        begin = time.perf_counter()
        session_id, number = request.session_id, request.number
        receipts = []
        if request.receipts:
            key = self._core.pool_key(session_id, tenant)
            receipts = codec.receipts_from_proto(key, request.receipts)
        operations = codec.operations_from_proto(request.operations)
        late_tokens = codec.late_tokens_from_proto(request.late_tokens)
        content = codec.content_digest(request)
        outcome = self._core.step(
            session_id,
            tenant,
            number,
            operations,
            receipts,
            late_tokens,
            content=content,
            atomic=atomic,
        )
        self._registrar.flush()
        self._metrics.count_step(operations, outcome, time.perf_counter() - begin)
        return outcome


def _require_ok(result: OperationResult) -> None:
    """Raise why a step of one operation, run before on a stream, did not do it."""
    if result.error is not None:
        raise result.error
    shortage = result.shortage
    if shortage is not None:
        text = f"{shortage.num_blocks_needed} blocks of the {shortage.tier.value} tier are needed"
        raise (PoolFullError if result.status is Status.LATER else NeverFitsError)(text)


def _plan_and_usage(step: pb.StepResult) -> dict[str, Any]:
    plan = step.plan if step.HasField("plan") else None
    return {"plan": plan, "usage": step.usage}
