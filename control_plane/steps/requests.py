"""The requests that have numbers: step, submit_receipts, abort_plan and resync.

Each applies its receipts first. Each runs in slices: most end in their first one. Between two
slices other sessions' requests run, and nothing changes its own session but the session's end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from control_plane.config import CoreConfig
from control_plane.pools.pool import Pool
from control_plane.queries import states
from control_plane.sessions.numbering import content_of
from control_plane.sessions.session import Session
from control_plane.sharing.member import Member
from control_plane.sharing.sharing import Sharing
from control_plane.steps.abort import abort_from, abort_plans
from control_plane.steps.deferred_tokens import take_deferred_tokens
from control_plane.steps.large_answers import LARGE_BYTES, LargeAnswer, large_answer
from control_plane.steps.operations import Step, check_no_plan, read_operations
from control_plane.steps.plans import finish_plan
from control_plane.steps.receipts import take_receipts
from control_plane.steps.slices import SLICE_SEQUENCES, SLICE_TOKENS
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.slices import Slices
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_LOGGER: Final = logging.getLogger(__name__)

Request = cpb.StepRequest | cpb.SubmitReceiptsRequest | cpb.AbortPlanRequest | cpb.ResyncRequest


class _Step(NamedTuple):
    """The outcome of a step. ``payload``: its plan's, if that is large and not in the message."""

    response: cpb.StepResponse
    payload: bytes


class Requests:
    """Runs the numbered requests of all sessions."""

    def __init__(
        self,
        config: CoreConfig,
        sharing_of: Callable[[Pool], Sharing],
        require_open: Callable[[Session], None],
    ) -> None:
        """``require_open`` raises why a session has ended, if it has."""
        self._config = config
        self._sharing_of = sharing_of
        self._require_open = require_open
        self._kinds: dict[type, Callable[[Member, Any], Slices[Any]]] = {
            cpb.StepRequest: self._step,
            cpb.SubmitReceiptsRequest: self._submit_receipts,
            cpb.AbortPlanRequest: self._abort_plan,
            cpb.ResyncRequest: self._resync,
        }

    def run(self, session: Session, request: Request) -> Slices[Any]:
        """Run a request under its number, or repeat its answer. Returns the answer: of a step with
        a large plan, a LargeAnswer. Raises why the request failed as a whole, and at any slice why
        the session has ended.
        """
        self._require_open(session)
        slices = self._answer(session, request)
        try:
            next(slices)
        except StopIteration as end:
            return end.value
        sharing = self._sharing_of(session.pool)
        sharing.set_busy(session.id, True)
        try:
            while True:
                yield
                self._require_open(session)
                next(slices)
        except StopIteration as end:
            return end.value
        finally:
            slices.close()
            sharing.set_busy(session.id, False)

    def _answer(self, session: Session, request: Request) -> Slices[Any]:
        content = content_of(request)
        answer = session.numbers.repeated(request.number, content)
        if answer is not None:
            yield from self._take_again(session, request)
            return answer.result()
        session.numbers.use()
        sharing = self._sharing_of(session.pool)
        member = sharing.members[session.id]
        try:
            message = yield from self._kinds[type(request)](member, request)
        except KvplaneError as error:
            session.numbers.remember(content, None, error)
            raise
        finally:
            sharing.serve()
        payload = b""
        if isinstance(message, _Step):
            message, payload = message
            if (news := member.take_news()) is not None:
                message.result.news.CopyFrom(news)
        if payload:
            message = large_answer(message, payload)
        is_large = isinstance(message, LargeAnswer)
        session.numbers.remember(content, message.encoded if is_large else message)
        return message

    def _take_again(self, session: Session, request: Request) -> Slices[None]:
        # A receipt is true whenever it arrives. One that is refused does not change the answer.
        try:
            yield from take_receipts(session, self._bounded(request.receipts))
        except KvplaneError as error:
            _LOGGER.info("a repeated request brought a receipt that was refused: %s", error.reason)

    def _step(self, member: Member, request: cpb.StepRequest) -> Slices[_Step]:
        yield from self._take_past(member, request)
        session = member.session
        operations = read_operations(request.operations, self._config.max_operations)
        if len(session.plans) >= self._config.max_plans_in_flight:
            check_no_plan(member, operations)
        response = cpb.StepResponse(number=request.number)
        result = response.result
        session.native.begin(session.handle, request.number)
        step = Step(member, self._sharing_of(session.pool))
        add = result.results.add
        for i, operation in enumerate(operations):
            yield from step.run(i, operation, add())
            if step.num_taken_tokens >= SLICE_TOKENS:
                step.num_taken_tokens = 0
                yield
        payload = yield from finish_plan(
            member, request.number, result, request.traceparent, most_bytes=LARGE_BYTES
        )
        pool = session.pool
        result.usage.CopyFrom(pool.usage())
        result.revision = pool.revision()
        return _Step(response, payload)

    def _submit_receipts(
        self, member: Member, request: cpb.SubmitReceiptsRequest
    ) -> Slices[cpb.SubmitReceiptsResponse]:
        yield from self._take_past(member, request)
        pool = member.session.pool
        return cpb.SubmitReceiptsResponse(usage=pool.usage(), revision=pool.revision())

    def _abort_plan(
        self, member: Member, request: cpb.AbortPlanRequest
    ) -> Slices[cpb.AbortPlanResponse]:
        session = member.session
        yield from take_receipts(session, self._bounded(request.receipts))
        yield from abort_from(session, request.plan_number)
        session.pool.statistics.num_aborts += 1
        return cpb.AbortPlanResponse(sequences=(yield from self._aborted(member)))

    def _resync(self, member: Member, request: cpb.ResyncRequest) -> Slices[cpb.ResyncResponse]:
        session = member.session
        yield from take_receipts(session, self._bounded(request.receipts))
        yield from abort_plans(session, next_plan=request.number, keeps_tables=False)
        session.pool.statistics.num_resyncs += 1
        response = cpb.ResyncResponse(sequences=(yield from self._aborted(member)))
        session.native.begin(session.handle, request.number)
        yield from finish_plan(member, request.number, response)
        return response

    def _aborted(self, member: Member) -> Slices[cpb.SequenceStates]:
        """Return the states of all sequences of the session after an abort."""
        session = member.session
        has_many = session.native.num_sequences(session.handle) > SLICE_SEQUENCES
        if has_many:
            yield
        sequences = states(session)
        self._sharing_of(session.pool).aborted(member, sequences)
        if has_many:
            yield
        return sequences

    def _take_past(
        self, member: Member, request: cpb.StepRequest | cpb.SubmitReceiptsRequest
    ) -> Slices[None]:
        yield from take_receipts(member.session, self._bounded(request.receipts))
        if request.HasField("deferred_tokens"):
            take_deferred_tokens(member, request.deferred_tokens, self._config.max_operations)

    def _bounded(self, receipts: Sequence[tpb.SignedPayload]) -> Sequence[tpb.SignedPayload]:
        most = self._config.max_operations
        if len(receipts) > most:
            raise InvalidRequestError(
                f"must be at most {most} receipts, not {len(receipts)}", field="receipts"
            )
        return receipts
