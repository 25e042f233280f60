"""A session: one engine's lease on one pool, and its calls.

All calls that change the session share one numbering (``kvplane.session.step_numbering``), so each
runs once however often it is sent. Background tasks renew the lease and submit the last receipts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from kvplane import ops, tracing
from kvplane.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleError,
    StaleIncarnationError,
    UnavailableError,
)
from kvplane.execution.execution import Execution, Executions
from kvplane.layout import Layout
from kvplane.results import (
    BlockTable,
    OperationResult,
    SequenceState,
    ShardInfo,
    Signed,
    StepResult,
    block_table,
    sequence_states,
)
from kvplane.session.sequences import list_sequences
from kvplane.session.step_numbering import AbandonedResult, Send, Steps
from kvplane.transport.connection import Connection
from kvplane.transport.opening import Opening
from kvplane.transport.retry import Deadline
from kvplane.transport.stream import Stream
from kvplane.wire import columns
from kvplane.wire.error_codec import from_wire
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.types_pb2 import SignedPayload

_LOGGER: Final = logging.getLogger(__name__)

# How long closing a replaced session may take; its lease ends by itself anyway.
_CLOSE_TIMEOUT_S: Final = 2.0
_RENEWALS_PER_LEASE: Final = 3
# How long a background submission of receipts may delay a call.
_IDLE_TIMEOUT_S: Final = 1.0
# A busy engine makes its next call within a step's time, and needs no background submission.
IDLE_S: Final = 0.1
_RETRY_S: Final = 1.0


class ReadmitResult(dict[int, int]):
    """Result of ``readmit``: tokens found cached, by sequence id. ``plan``, unless None, must run
    before later ones.
    """

    def __init__(self, num_cached_tokens: Mapping[int, int], plan: Signed | None) -> None:
        super().__init__(num_cached_tokens)
        self.plan = plan


@dataclass(frozen=True, slots=True)
class AbortResult:
    """Result of ``abort_plans``: the state of every sequence. ``plan``, unless None, contains all
    tables whole and must run before later ones.
    """

    sequences: list[SequenceState]
    plan: Signed | None


class Session:
    """A session of an engine on a pool. Made by ``ControlClient.open_session``. ``time_to_live_s``:
    the lease, renewed by any call.

    Every call takes ``timeout_s``, the client's default when None, and is sent again until then
    while the plane cannot be reached. A call that was cancelled or timed out may be made again: it
    is then the same step. If another call comes instead, the first one is sent again before it, and
    its answer is kept for ``take_abandoned``. Raises StaleError or SessionNotFoundError when the
    session is over: ``reopen`` and ``readmit`` then.

    Receipts that no call carries are submitted in the background after a tenth of a second.
    Otherwise the blocks of the last plan would stay hidden from others, or retired.
    """

    def __init__(
        self,
        open_again: Callable[[float], Awaitable[Session]],
        connection: Connection,
        stub: Any,
        request: pb.OpenSessionRequest,
        response: pb.OpenSessionResponse,
        executions: Executions,
    ) -> None:
        self._connection = connection
        self._executions = executions
        self._stub = stub
        self.ref = response.session
        self.pool_id = request.pool_id
        self.client_name = request.client_name
        self.namespace = request.namespace
        self.layout = Layout.from_proto(request.layout)
        self.grant: Signed = response.grant
        self.shards = tuple(map(ShardInfo.from_proto, response.shards))
        self.max_plans_in_flight = response.max_plans_in_flight
        self.time_to_live_s = response.time_to_live.ToTimedelta().total_seconds()
        self._open_again = open_again
        self._ended_by: KvplaneError | None = None
        self._steps = Steps()
        self._was_told = False
        self._stream: Stream[pb.StreamStepsRequest, pb.StreamStepsResponse] = Stream(
            lambda: stub.StreamSteps()
        )
        self._tasks = (
            asyncio.create_task(self._renew_lease(), name=f"renew session {self.id}"),
            asyncio.create_task(
                _submit_when_idle(self._steps.changed, self._submit_idle, self.id),
                name=f"submit receipts of session {self.id}",
            ),
        )

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._try_to_close()

    @property
    def id(self) -> int:
        """The session's id."""
        return self.ref.session_id

    @property
    def incarnation(self) -> int:
        """The incarnation of the control plane that opened the session."""
        return self.ref.incarnation

    @property
    def last_number(self) -> int:
        """The number of the last answered call of this object's methods, which is also its plan's
        number; 0 before the first.
        """
        return self._steps.last_number

    @property
    def ended_by(self) -> KvplaneError | None:
        """The error that ended the session, once a call or the lease's renewal has learnt it; else
        None. Calls that change the session raise it from then on.
        """
        return self._ended_by

    def open_execution(self, *, timeout_s: float | None = None) -> Opening[Execution]:
        """Open an execution, which runs the session's plans on all shards: ``await`` it, or enter
        it with ``async with``.

        It uses the certificates, deadline and shared memory of the session's client, adds each
        plan's receipts to the session, and is closed with the session.
        """
        return self._executions.open(
            self.grant,
            [info.address for info in self.shards],
            [info.shard for info in self.shards],
            self.layout,
            take_receipt=self.add_receipt,
            timeout_s=timeout_s,
        )

    def add_receipt(self, receipt: Signed | None) -> None:
        """Submit ``receipt`` with the next numbered call, or in the background when none comes.
        Executions of ``open_execution`` add theirs by themselves.

        Raises InvalidRequestError for None, which is no receipt.
        """
        if receipt is None:
            raise InvalidRequestError(
                "is None: a plan has one when all its layers have run", field="receipt"
            )
        self._steps.add_receipt(cast(SignedPayload, receipt))

    def take_abandoned(self) -> list[AbandonedResult]:
        """Return the answers to abandoned calls and to refused runs that had a plan, each once.
        Their plans must run before later ones.
        """
        taken, self._steps.abandoned = self._steps.abandoned, []
        return taken

    async def wait_for_news(self, timeout_s: float) -> bool:
        """Wait between steps for the control plane to push news. Returns whether some may have
        come: the next step's answer has them.
        """
        return self._was_told or await self._stream.arrives(timeout_s)

    async def step(
        self,
        operations: Iterable[ops.Operation],
        deferred_tokens: ops.DeferredTokens | None = None,
        *,
        timeout_s: float | None = None,
    ) -> StepResult:
        """Make a step: apply pending receipts, then deferred tokens, then ``operations`` in order;
        see StepResult.

        Raises TooManyPlansInFlightError and whatever made the step as a whole fail; an item of an
        operation that fails by itself is in the result: see ``StepResult.raise_for_status``.
        """
        message = self._message(operations, deferred_tokens)
        deadline = self._connection.deadline(timeout_s)
        result: StepResult = await self._call_step(message, deadline)
        self._was_told = False
        return self._steps.with_unread_news(result)

    async def run(self, operation: ops.Operation, *, timeout_s: float | None = None) -> StepResult:
        """Make a step of one operation. Raises the error of an item that was not done
        (``kvplane.results.error_of``): PoolFullError for LATER, with the time to wait, and
        NeverFitsError for NEVER. The step's plan, if it has one, is then in ``take_abandoned``.
        """
        result = await self.step([operation], timeout_s=timeout_s)
        try:
            return result.raise_for_status()
        except KvplaneError:
            if result.plan is not None:
                self._steps.abandoned.append(AbandonedResult(self.last_number, result))
            raise

    async def readmit(
        self,
        sequences: Mapping[int, tuple[ops.Tokens, int]],
        *,
        timeout_s: float | None = None,
    ) -> ReadmitResult:
        """Admit sequences again, ``{sequence_id: (token_ids, max_total_tokens)}``, in one step.

        Nothing is computed yet: later appends compute the uncached tokens. Sequences without room
        now are absent from the answer. Raises NeverFitsError, or the error of an operation that was
        wrong; the other sequences are admitted nevertheless, and the answer is then in
        ``take_abandoned``.
        """
        operations = [
            ops.admit(sequence_id, tokens, num_compute_tokens=0, max_total_tokens=max_total)
            for sequence_id, (tokens, max_total) in sequences.items()
        ]
        result = await self.step(operations, timeout_s=timeout_s)
        cached: dict[int, int] = {}
        for sequence_id, outcome in zip(sequences, result.results, strict=True):
            if not outcome.failures:
                cached[sequence_id] = outcome.admit.num_cached_tokens
            elif not outcome.failures[0].is_later:
                self._steps.abandoned.append(AbandonedResult(self.last_number, result))
                raise outcome.failures[0].error
        return ReadmitResult(cached, result.plan)

    async def abort_plans(
        self, plan_number: int = 0, *, whole_tables: bool = False, timeout_s: float | None = None
    ) -> AbortResult:
        """Submit pending receipts, then abort every plan that has none. ``plan_number``: the plan
        to give up; 0 for whatever is in flight. ``whole_tables``: whether to get a plan of them.

        Raises PlanReceiptedError if the plan has run.
        """
        request = pb.AbortPlansRequest(
            session=self.ref, plan_number=plan_number, whole_tables=whole_tables
        )
        deadline = self._connection.deadline(timeout_s)
        response: pb.AbortPlansResponse = await self._call(request, self._send_abort, deadline)
        self._steps.forget_grants()
        plan = response.plan if response.HasField("plan") else None
        return AbortResult(sequence_states(response.sequences), plan)

    async def submit_receipts(
        self, deferred_tokens: ops.DeferredTokens | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Submit pending receipts, and deferred tokens, by a step without operations. Its news are
        in the answer to the next step.
        """
        deadline = self._connection.deadline(timeout_s)
        while True:
            message = self._message((), deferred_tokens)
            self._steps.keep_news(await self._call_step(message, deadline))
            # A repeat of an abandoned call is sent as that was, without the receipts added since.
            if not self._steps.receipts:
                return
            deferred_tokens = None

    async def reopen(self, *, timeout_s: float = 60.0) -> Session:
        """Open a new session like this one, once the pool is ready, and try to close this one."""
        deadline = Deadline.after(timeout_s)
        await self._try_to_close()
        return await self._open_again(deadline.remaining_s)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Release all that the session holds. Closing a session that has ended is no error."""
        await self.detach()
        request = pb.CloseSessionRequest(session=self.ref)
        with suppress(SessionNotFoundError, SessionExpiredError, StaleIncarnationError):
            await self._connection.call(self._stub.CloseSession, request, timeout_s)
            self._note_end(
                SessionNotFoundError("was closed here: open another", field="session.session_id")
            )

    async def detach(self) -> None:
        """Close the executions, stop renewing the lease and end the stream, without telling the
        control plane.
        """
        await self._executions.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._stream.close()

    # Queries, which change nothing and have no number: they may be made while a step runs.

    async def validate(
        self, operations: Iterable[ops.Operation], *, timeout_s: float | None = None
    ) -> list[OperationResult]:
        """Return what a step of each operation alone would answer now, with one item of it at a
        time. Nothing is reserved: another session may come first. Renews no lease.
        """
        request = self._message(operations).step
        request.validate_only = True
        response: pb.StepResponse = await self._connection.call(self._stub.Step, request, timeout_s)
        return StepResult(response).results

    async def list_sequences(
        self, sequence_ids: ops.Column = (), *, timeout_s: float | None = None
    ) -> list[SequenceState]:
        """Get the states of these sequences, or of all for none, ids ascending. Renews no lease.
        Raises SequenceNotFoundError.
        """
        return await list_sequences(self._connection, self._stub, self.ref, sequence_ids, timeout_s)

    async def get_block_table(
        self, sequence_id: int, *, timeout_s: float | None = None
    ) -> list[BlockTable]:
        """Get a sequence's table in each layer group. Renews no lease. Raises
        SequenceNotFoundError.
        """
        request = pb.ListSequencesRequest(
            session=self.ref,
            sequence_ids=columns.pack(columns.INT64, [sequence_id]),
            with_tables=True,
        )
        response: pb.ListSequencesResponse = await self._connection.call(
            self._stub.ListSequences, request, timeout_s
        )
        return [block_table(each) for each in response.tables]

    # Helpers.

    def _message(
        self,
        operations: Iterable[ops.Operation] = (),
        deferred_tokens: ops.DeferredTokens | None = None,
    ) -> pb.StreamStepsRequest:
        """Return a step as the stream's message, made in place as copying costs time."""
        message = pb.StreamStepsRequest()
        message.step.session.CopyFrom(self.ref)
        message.step.operations.extend(cast("Iterable[pb.Operation]", operations))
        if deferred_tokens is not None:
            message.step.deferred_tokens.CopyFrom(cast("pb.DeferredTokens", deferred_tokens))
        return message

    async def _try_to_close(self) -> None:
        """Close the session, ignoring failures: the lease ends by itself."""
        try:
            await self.close(timeout_s=_CLOSE_TIMEOUT_S)
        except (UnavailableError, DeadlineExceededError, StaleError, CancelledError) as error:
            _LOGGER.warning("session=%d not closed, its lease will end it: %s", self.id, error)

    async def _renew_lease(self) -> None:
        interval_s = self.time_to_live_s / _RENEWALS_PER_LEASE
        request = pb.RenewSessionRequest(session=self.ref)
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._connection.call(self._stub.RenewSession, request, interval_s)
            except (UnavailableError, DeadlineExceededError) as error:
                _LOGGER.warning("session=%d lease not renewed: %s", self.id, error)
            except KvplaneError as error:
                _LOGGER.warning("session=%d lost: %s", self.id, error)
                self._note_end(error)
                return

    async def _call(self, request: Any, send: Send, deadline: Deadline) -> Any:
        """Make a numbered call. Raises the session's error at once if it is known to be over."""
        if self._ended_by is not None:
            raise _copy(self._ended_by)
        name = f"kvplane.{type(request).__name__}"
        with tracing.span(name, kind="CLIENT", pool=self.pool_id, session=self.id):
            if isinstance(request, pb.StepRequest):
                request.traceparent = tracing.traceparent()
            try:
                return await self._steps.call(request, send, deadline)
            except KvplaneError as error:
                self._note_end(error)
                raise

    def _note_end(self, error: KvplaneError) -> None:
        over = isinstance(error, SessionNotFoundError | StaleError)
        if over and error.field.startswith("session.") and self._ended_by is None:
            self._ended_by = error

    async def _submit_idle(self) -> None:
        message = self._message()
        send = partial(self._send_step, message)
        await self._steps.submit_idle(message.step, send, Deadline.after(_IDLE_TIMEOUT_S))

    async def _send_abort(self, request: Any, deadline: Deadline) -> Any:
        return await self._connection.attempt(self._stub.AbortPlans, request, deadline)

    async def _call_step(self, message: pb.StreamStepsRequest, deadline: Deadline) -> StepResult:
        send = partial(self._send_step, message)
        return cast(StepResult, await self._call(message.step, send, deadline))

    async def _send_step(
        self, message: pb.StreamStepsRequest, request: pb.StepRequest, _: Deadline
    ) -> StepResult:
        if not self._stream.is_open:
            self._stream.open()
        await self._stream.send(message)
        response = await self._stream.receive()
        while response.number == 0:
            if response.HasField("error"):  # the control plane could not read the request
                raise from_wire(response.error)
            if response.HasField("news"):
                self._was_told = True
            response = await self._stream.receive()
        if response.number != request.number:
            self._stream.drop()
            text = f"step {request.number} was answered as {response.number}: the stream is broken"
            raise PlaneUnavailableError(text)
        if response.WhichOneof("message") != "step":
            raise from_wire(response.error)
        return StepResult(response.step)


async def _submit_when_idle(
    changed: asyncio.Event, submit: Callable[[], Awaitable[None]], session_id: int
) -> None:
    """Submit the last receipts of an engine that has nothing more to compute: call ``submit``
    whenever ``changed`` was set and then not again for ``IDLE_S`` seconds. Runs until it is
    cancelled.

    Retries when the plane cannot be reached or gives a retry delay, and without a receipt that the
    plane refuses. Other refusals are logged, and nothing is sent before the next change.
    """
    while True:
        await changed.wait()
        changed.clear()
        await asyncio.sleep(IDLE_S)
        if changed.is_set():
            continue
        try:
            await submit()
        except KvplaneError as error:
            delay_s = error.retry_delay_s
            if isinstance(error, UnavailableError | DeadlineExceededError):
                delay_s = max(delay_s or 0.0, _RETRY_S)
            elif error.field.startswith("receipts["):
                delay_s = 0.0
            _LOGGER.warning("session=%d receipts not submitted: %s", session_id, error)
            if delay_s is not None:
                await asyncio.sleep(delay_s)
                changed.set()


def _copy(error: KvplaneError) -> KvplaneError:
    """Copy an error to raise it again: one object raised twice would gather both tracebacks."""
    return type(error)(error.message, field=error.field, retry_delay_s=error.retry_delay_s)
