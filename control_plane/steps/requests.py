"""The requests that have numbers: step, submit_receipts, abort_plan and resync.

Each applies its receipts first. One that takes long is run in slices; between two of them other
sessions' requests run, and nothing changes its own session but its end.
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
from control_plane.steps.planner import Planner, check_no_plan, read_operations
from control_plane.steps.plans import finish_in_slices, finish_plan
from control_plane.steps.receipts import take_in_slices, take_receipts
from control_plane.steps.slices import (
    MANY_TOKENS,
    SLICE_BLOCKS,
    SLICE_TOKENS,
    SWAPS,
    Slices,
    num_tokens_of,
    paced,
    swaps,
)
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_LOGGER: Final = logging.getLogger(__name__)
# More than this of it makes a request take some milliseconds.
_MANY_TOKENS: Final = MANY_TOKENS
_FEW_OPERATIONS: Final = 4
_MANY_SEQUENCES: Final = 4096
_MANY_BLOCKS: Final = 65_536

Request = cpb.StepRequest | cpb.SubmitReceiptsRequest | cpb.AbortPlanRequest | cpb.ResyncRequest


class _Step(NamedTuple):
    """What a step came to. ``payload``: its plan's, where that is large and not in the message."""

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
        """``require_open`` raises why a session is over."""
        self._config = config
        self._sharing_of = sharing_of
        self._require_open = require_open
        self._run: dict[type, Callable[[Member, Any, bool], Slices[Any]]] = {
            cpb.StepRequest: self._step,
            cpb.SubmitReceiptsRequest: self._submit_receipts,
            cpb.AbortPlanRequest: self._abort_plan,
            cpb.ResyncRequest: self._resync,
        }

    def takes_long(self, session: Session, request: Request) -> bool:
        """Whether others should be served while the request runs."""
        native, handle = session.native, session.handle
        may_end_plans = request.receipts or type(request) is cpb.AbortPlanRequest
        if may_end_plans and native.num_tokens_in_flight(handle) > _MANY_TOKENS:
            return True
        if type(request) is cpb.SubmitReceiptsRequest:
            return False
        if type(request) is cpb.StepRequest:
            if _brings_many_tokens(request.operations):
                return True
            if session.num_held() > SLICE_BLOCKS and any(map(swaps, request.operations)):
                return True
            if not session.resync_due:
                return False
        if native.num_sequences(handle) > _MANY_SEQUENCES:
            return True
        if type(request) is cpb.AbortPlanRequest:
            return False
        is_step = type(request) is cpb.StepRequest
        return (native.num_unsent(handle) if is_step else session.num_held()) > _MANY_BLOCKS

    def answer(self, session: Session, request: Request, *, in_slices: bool = False) -> Slices[Any]:
        """Run a request under its number, or repeat the answer that it got. Ends with the answer,
        or raises why the request failed as a whole. Yields only if ``in_slices``; the answer to a
        step may be a LargeAnswer then.
        """
        if in_slices:  # it may have had to wait
            self._require_open(session)
        content = content_of(request)
        if in_slices:
            yield
            self._require_open(session)
        answer = session.numbers.repeated(request.number, content)
        if answer is not None:
            self._take_again(session, request)
            return answer.result()
        session.numbers.use()
        sharing = self._sharing_of(session.pool)
        member = sharing.members[session.id]
        slices = self._run[type(request)](member, request, in_slices)
        try:
            message = yield from self._held(session, sharing, slices) if in_slices else slices
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

    def _held(self, session: Session, sharing: Sharing, slices: Slices[Any]) -> Slices[Any]:
        """The slices, while the pool's queue decides nothing."""
        sharing.is_held = True
        try:
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    return end.value
                yield
                self._require_open(session)
        finally:
            sharing.is_held = False

    def _take_again(self, session: Session, request: Request) -> None:
        # A receipt is true whenever it arrives. One that is refused does not change the answer.
        try:
            take_receipts(session, self._bounded(request.receipts))
        except KvplaneError as error:
            _LOGGER.info("a repeated request brought a receipt that was refused: %s", error.reason)

    def _step(self, member: Member, request: cpb.StepRequest, in_slices: bool) -> Slices[_Step]:
        yield from self._take_past(member, request, in_slices)
        session = member.session
        operations = read_operations(request.operations, self._config.max_operations)
        if len(session.plans) >= self._config.max_plans_in_flight:
            check_no_plan(member, operations)
        response = cpb.StepResponse(number=request.number)
        result = response.result
        session.native.begin(session.handle, request.number)
        sharing = self._sharing_of(session.pool)
        planner = Planner(member, sharing, in_slices=in_slices)
        add = result.results.add
        num_tokens, payload = 0, b""
        for i, operation in enumerate(operations):
            if in_slices:
                if num_tokens >= SLICE_TOKENS:
                    yield
                    num_tokens = 0
                num_tokens += num_tokens_of(request.operations[i])
                if operation[0] == "append" and num_tokens >= SLICE_TOKENS:
                    yield
                    yield from planner.append_in_slices(i, operation[1], add())
                    continue
            outcome = add()
            planner.run(i, operation, outcome)
            if in_slices and operation[0] in SWAPS:
                num_blocks = outcome.swap_out.num_blocks + outcome.swap_in.num_blocks
                yield from planner.swap_in_slices(num_blocks)
                num_tokens += num_blocks * SLICE_TOKENS // SLICE_BLOCKS
        if in_slices:
            yield
            payload = yield from finish_in_slices(
                member, request.number, result, request.traceparent, most_bytes=LARGE_BYTES
            )
        else:
            finish_plan(member, request.number, result, request.traceparent)
        pool = session.pool
        result.usage.CopyFrom(pool.usage())
        result.revision = pool.revision()
        return _Step(response, payload)

    def _submit_receipts(
        self, member: Member, request: cpb.SubmitReceiptsRequest, in_slices: bool
    ) -> Slices[cpb.SubmitReceiptsResponse]:
        yield from self._take_past(member, request, in_slices)
        pool = member.session.pool
        return cpb.SubmitReceiptsResponse(usage=pool.usage(), revision=pool.revision())

    def _abort_plan(
        self, member: Member, request: cpb.AbortPlanRequest, in_slices: bool
    ) -> Slices[cpb.AbortPlanResponse]:
        session = member.session
        yield from self._take_receipts(session, request, in_slices)
        yield from paced(abort_from(session, request.plan_number), in_slices=in_slices)
        session.pool.statistics.num_aborts += 1
        if in_slices:
            yield
        sequences = states(session)
        self._sharing_of(session.pool).aborted(member, sequences)
        return cpb.AbortPlanResponse(sequences=sequences)

    def _resync(
        self, member: Member, request: cpb.ResyncRequest, in_slices: bool
    ) -> Slices[cpb.ResyncResponse]:
        session = member.session
        yield from self._take_receipts(session, request, in_slices)
        aborting = abort_plans(session, next_plan=request.number, keeps_tables=False)
        yield from paced(aborting, in_slices=in_slices)
        session.pool.statistics.num_resyncs += 1
        if in_slices:
            yield
        sequences = states(session)
        self._sharing_of(session.pool).aborted(member, sequences)
        if in_slices:
            yield
        response = cpb.ResyncResponse(sequences=sequences)
        session.native.begin(session.handle, request.number)
        if in_slices:
            yield from finish_in_slices(member, request.number, response)
        else:
            finish_plan(member, request.number, response)
        return response

    def _take_receipts(self, session: Session, request: Request, in_slices: bool) -> Slices[None]:
        receipts = self._bounded(request.receipts)
        yield from paced(take_in_slices(session, receipts), in_slices=in_slices)

    def _take_past(
        self,
        member: Member,
        request: cpb.StepRequest | cpb.SubmitReceiptsRequest,
        in_slices: bool,
    ) -> Slices[None]:
        yield from self._take_receipts(member.session, request, in_slices)
        if request.HasField("deferred_tokens"):
            take_deferred_tokens(member, request.deferred_tokens, self._config.max_operations)

    def _bounded(self, receipts: Sequence[tpb.SignedPayload]) -> Sequence[tpb.SignedPayload]:
        most = self._config.max_operations
        if len(receipts) > most:
            raise InvalidRequestError(
                f"must be at most {most} receipts, not {len(receipts)}", field="receipts"
            )
        return receipts


def _brings_many_tokens(operations: Sequence[cpb.Operation]) -> bool:
    # To learn the length of bytes in a message copies them, and a few admissions do not take long.
    if len(operations) <= _FEW_OPERATIONS:
        return sum(len(each.append.token_ids) for each in operations) > 4 * _MANY_TOKENS
    return sum(map(num_tokens_of, operations)) > _MANY_TOKENS
