"""The requests that have numbers: Step and AbortPlans.

Each applies its receipts first. Each runs in slices: most end in their first one. Between two
slices other sessions' requests run, and nothing changes its own session but the session's end.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Container, Sequence
from itertools import accumulate
from typing import Any, Final

from kvplane_blocks import ColumnError

from control_plane.config import CoreConfig
from control_plane.queries import states
from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.session import Session
from control_plane.sessions.sessions import Sessions
from control_plane.steps.answers import SignedPlan, StepAnswer, step_answer
from control_plane.steps.failures import error_of, error_of_columns
from control_plane.steps.operation import Named
from control_plane.steps.operations import (
    DEFERRED_TOKENS,
    Step,
    check_no_plan,
    may_plan,
    read_operations,
)
from control_plane.steps.plans import finish_plan
from control_plane.steps.receipts import end_with_plans, take_receipts
from control_plane.steps.slices import SLICE_ENTRIES, SLICE_SEQUENCES, SLICE_TOKENS
from kvplane.errors import InvalidRequestError, KvplaneError, PlanReceiptedError
from kvplane.slices import Slices
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_LOGGER: Final = logging.getLogger(__name__)

Request = cpb.StepRequest | cpb.AbortPlansRequest


_Step = tuple[Sequence[Named], cpb.StepResponse, SignedPlan | None]
"""The outcome of a step: its operations, a response with their results alone, and its plan."""


class Requests:
    """Runs the numbered requests of all sessions, Step and AbortPlans."""

    def __init__(
        self,
        config: CoreConfig,
        sessions: Sessions,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._kinds: dict[type, Callable[[Session, PoolAdmission, Any], Slices[Any]]] = {
            cpb.StepRequest: self._step,
            cpb.AbortPlansRequest: self._abort_plans,
        }

    def run(self, session: Session, request: Request) -> Slices[Any]:
        """Run a request under its number, or return the answer that the number got before. Returns
        the answer's message, which for a Step is a StepAnswer. Raises why the request failed as a
        whole, and at any slice why the session has ended, with the number that the session's next
        request must have.
        """
        self._sessions.require_open(session)
        admission, numbers = self._sessions.admission_of(session.pool), session.numbers
        try:
            if numbers.is_remembered(request.number):
                yield from numbers.digest(request)
                self._sessions.require_open(session)
            earlier = numbers.repeated(request)
        except KvplaneError as error:
            error.next_number = numbers.last + 1
            raise
        slices: Slices[Any]
        if earlier is not None:
            slices = self._take_again(session, admission, request)
        else:
            numbers.use()
            slices = self._kinds[type(request)](session, admission, request)
        is_busy, outcome = False, None
        try:
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    outcome = end.value
                    break
                if not is_busy:
                    is_busy = True
                    admission.set_busy(session.id, True)
                yield
                self._sessions.require_open(session)
            if is_busy and earlier is None:
                # It may be large, and its caller gone: no more than its digest is kept.
                yield from numbers.digest(request)
                self._sessions.require_open(session)
        except KvplaneError as error:
            error.next_number = request.number + 1
            if earlier is None and self._sessions.by_id.get(session.id) is session:
                yield from numbers.digest(request)
                numbers.remember(request, None, error)
            raise
        finally:
            slices.close()
            admission.serve()
            if is_busy:
                admission.set_busy(session.id, False)
        if earlier is not None:
            return earlier.result()
        if not isinstance(outcome, tuple):
            numbers.remember(request, outcome)
            numbers.settle()
            return outcome
        news = admission.news.take(session)
        operations, result, plan = outcome
        answer = step_answer(session, request.number, operations, result, plan, news)
        numbers.remember(request, StepAnswer(answer.encoded, answer.step_at))
        return answer

    def _take_again(
        self, session: Session, admission: PoolAdmission, request: Request
    ) -> Slices[None]:
        # A receipt is true whenever it arrives. One that is refused does not change the answer.
        try:
            yield from take_receipts(session, admission, self._bounded(request.receipts))
        except KvplaneError as error:
            _LOGGER.info("a repeated request brought a receipt that was refused: %s", error.reason)

    def _step(
        self, session: Session, admission: PoolAdmission, request: cpb.StepRequest
    ) -> Slices[_Step]:
        if request.receipts:
            yield from take_receipts(session, admission, self._bounded(request.receipts))
        if request.HasField("deferred_tokens"):
            take_deferred_tokens(session, request.deferred_tokens, self._config.max_operations)
        if not request.operations:
            return (), cpb.StepResponse(), None
        operations = read_operations(request.operations, self._config.max_operations)
        if len(session.plans) >= self._config.max_plans_in_flight:
            check_no_plan(session, operations)
        session.native.begin(session.handle, request.number)
        step, result = Step(session, admission), cpb.StepResponse()
        for i, operation in enumerate(operations):
            yield from step.run(i, operation, result.results.add())
            if step.num_taken_tokens >= SLICE_TOKENS:
                step.num_taken_tokens = 0
                yield
        plan = None
        if may_plan(session, operations):
            plan = yield from finish_plan(session, request.number, request.traceparent)
        return operations, result, plan

    def _abort_plans(
        self, session: Session, admission: PoolAdmission, request: cpb.AbortPlansRequest
    ) -> Slices[cpb.AbortPlansResponse]:
        statistics = session.pool.statistics
        yield from take_receipts(session, admission, self._bounded(request.receipts))
        yield from abort_plans(session, request)
        yield from end_with_plans(session, admission, session.last_plan)
        if request.whole_tables:
            statistics.num_resyncs += 1
        else:
            statistics.num_aborts += 1
        response = cpb.AbortPlansResponse(sequences=(yield from self._aborted(session, admission)))
        if request.whole_tables:
            session.native.begin(session.handle, request.number)
            plan = yield from finish_plan(session, request.number)
            assert plan is not None, "such an abort has a plan, even if it has no table"
            response.plan.type = signing.PLAN  # one of its own would be copied
            response.plan.payload, response.plan.signature = plan
        return response

    def _aborted(self, session: Session, admission: PoolAdmission) -> Slices[cpb.SequenceStates]:
        """Return the states of all sequences of the session after an abort."""
        admission.news.drop_grants(session)  # the answer says what has become of them
        admission.apply(session)
        has_many = session.native.num_sequences(session.handle) > SLICE_SEQUENCES
        if has_many:
            yield
        sequences = states(session)
        if has_many:
            yield
        return sequences

    def _bounded(self, receipts: Sequence[tpb.SignedPayload]) -> Sequence[tpb.SignedPayload]:
        most = self._config.max_operations
        if len(receipts) > most:
            raise InvalidRequestError(
                f"must be at most {most} receipts, not {len(receipts)}", field="receipts"
            )
        return receipts


def abort_plans(session: Session, request: cpb.AbortPlansRequest) -> Slices[None]:
    """Abort all plans in flight, by cutting every sequence to its written tokens, some blocks in
    each slice. The next plan states all tables; with ``whole_tables`` it is this request's plan,
    and contains each table whole.

    Each sequence is cut to what receipts say was written, so every plan in flight loses its spans.
    Their transfers are undone: tables refer to the sources again, which were pinned for this, in
    place of the copies. Forks and frees stay. The data plane learns of the abort from the next
    plan: entries that it has are named, not sent again. Until that plan has run, blocks released
    here stay retired.

    Raises PlanReceiptedError when the request names no plan after the last that ran, and
    InvalidRequestError when it names a later number that made no plan.
    """
    plan_number, keeps_tables = request.plan_number, not request.whole_tables
    if session.is_voided(plan_number):
        if keeps_tables:
            return
    elif plan_number:
        if 0 < plan_number <= session.done:
            raise PlanReceiptedError(
                f"{plan_number} is not after plan {session.done}, the last that ran: what was "
                "written stays",
                field="plan_number",
            )
        if plan_number not in session.plans:
            raise InvalidRequestError("is not the number of a plan", field="plan_number")
    for number in session.plans:
        session.void(number)
    session.drop_plans([*session.plans])
    next_plan = request.number + (1 if keeps_tables else 0)
    while session.native.abort(session.handle, next_plan, keeps_tables, SLICE_ENTRIES):
        yield


def take_deferred_tokens(session: Session, message: cpb.DeferredTokens, max_items: int) -> None:
    """Add token ids to sequences whose slots were scheduled without them; ids that are known
    already are skipped. All are checked before any is added.

    Raises InvalidRequestError or SequenceNotFoundError naming a column of ``deferred_tokens``; then
    none is added.
    """
    num = columns.count(INT64, message.sequence_ids)
    if num > max_items:
        raise InvalidRequestError(
            f"must be at most {max_items} sequences, not {num}",
            field="deferred_tokens.sequence_ids",
        )
    given = message
    kept: Sequence[int] = range(num)
    if session.revoked:
        message, kept = _without(message, session.revoked)
    try:
        failure = session.native.deferred_tokens(
            session.handle,
            message.sequence_ids,
            message.admitted_by,
            message.first_positions,
            message.num_tokens,
            message.token_ids,
        )
    except ColumnError as column:
        raise error_of_columns(column, at="deferred_tokens.") from column
    if failure is None:
        return
    item = kept[failure[0]]
    error = error_of(session, DEFERRED_TOKENS, failure)
    if error.field == "token_ids":  # indexed by the item's first token
        num_tokens = columns.read(INT32, given.num_tokens, "num_tokens")
        item = sum(num_tokens[:item])
    raise type(error)(error.message, field=f"deferred_tokens.{error.field}[{item}]")


def _without(
    message: cpb.DeferredTokens, revoked: Container[int]
) -> tuple[cpb.DeferredTokens, Sequence[int]]:
    """Return the message without the tokens of cut sequences, which the engine may not know of yet,
    and the indices of the items that are left. Columns that cannot be read are left as they are.
    """
    ids = columns.read(INT64, message.sequence_ids, "deferred_tokens.sequence_ids")
    kept = [i for i, sequence_id in enumerate(ids) if sequence_id not in revoked]
    num_tokens = array(INT32, message.num_tokens[: 4 * len(ids)])
    if len(kept) == len(ids) or len(num_tokens) < len(ids):
        return message, range(len(ids))
    ends = list(accumulate(num_tokens, initial=0))

    def pick(column: bytes, size: int) -> bytes:
        return b"".join([column[size * i : size * (i + 1)] for i in kept])

    without = cpb.DeferredTokens(
        sequence_ids=pick(message.sequence_ids, 8),
        admitted_by=pick(message.admitted_by, 8),
        first_positions=pick(message.first_positions, 4),
        num_tokens=pick(message.num_tokens, 4),
        token_ids=b"".join([message.token_ids[4 * ends[i] : 4 * ends[i + 1]] for i in kept]),
    )
    return without, kept
