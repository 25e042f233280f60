"""Steps of the most common shapes, from bytes to bytes: receipts, and at most one operation, an
append or the admission of one sequence.

    bytes ──► PlainStep ──► one call of the core ──► plan, which is signed ──► bytes
                  └─► None: the request is read as a message and run by ``Requests``

``Requests`` is the reference: both reach the same state and return the same answers. Requests that
are not plain are left to it, with nothing changed but receipts, which may be applied again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvplane_blocks import MAX_PLAIN_RECEIPTS, PlainStep

from control_plane.config import CoreConfig
from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session
from control_plane.sharing.member import Member
from control_plane.sharing.sharing import LATER, Sharing
from control_plane.steps.failures import add_failures, shortage_of
from control_plane.steps.operation import Failure
from control_plane.steps.operations import OPERATIONS
from control_plane.steps.plans import begin_plan, finish_plan
from control_plane.steps.receipts import apply_receipts
from control_plane.steps.slices import MANY_TOKENS
from kvplane.errors import BadSignatureError
from kvplane.slices import run_to_end
from kvplane.v1 import control_pb2 as cpb
from kvplane.wire import signing


class PlainAnswer(NamedTuple):
    """An encoded StepResponse with a result. ``kind``: the operation's, empty without one.
    ``num_done``: its items. ``response``: the same as a message, if items were refused.
    """

    encoded: bytes
    kind: str
    num_done: int
    has_plan: bool
    response: cpb.StepResponse | None = None


def may_be_plain(config: CoreConfig) -> bool:
    """Whether plain steps are within the bounds of ``config`` for what one request holds."""
    return config.max_operations >= MAX_PLAIN_RECEIPTS


class PlainSteps:
    """Runs the plain steps of all sessions."""

    def __init__(self, config: CoreConfig, sharing_of: Callable[[Pool], Sharing]) -> None:
        self._config = config
        self._sharing_of = sharing_of
        self._are_allowed = may_be_plain(config)

    def answer(self, session: Session, request: PlainStep) -> PlainAnswer | None:
        """Run a step under its number. Returns None when it is for ``Requests``; nothing has then
        changed but perhaps receipts.
        """
        number, numbers, config = request.number, session.numbers, self._config
        if not self._are_allowed or number != numbers.last + 1:
            return None
        sharing = self._sharing_of(session.pool)
        member = sharing.members[session.id]
        if not sharing.is_idle or member.news is not None:
            return None
        kind = request.kind
        highest = _receipted(session, request)
        if highest is None or request.num_items > config.max_operations:
            return None
        done = min(highest)
        num_left = len([plan for plan in session.plans if plan > done])
        if num_left >= config.max_plans_in_flight:
            return None
        headroom = sharing.num_headroom if kind == "admit" else 0
        ran = session.native.plain_step(
            session.handle, request, done, headroom, MANY_TOKENS, session.plan_prefix
        )
        if ran is None:
            return None
        apply_receipts(session, highest)
        if len(ran) == 2:
            return self._later(member, sharing, request, *ran)
        numbers.use()
        came_to, failures, payload, spent_s = ran
        if kind:
            session.pool.statistics.allocation_s[kind].add(spent_s)
        if kind == "admit":
            assert isinstance(came_to, tuple)
            key, ids = member.families.new_key(), [request.sequence_id]
            sharing.started(member, key, ids, request.num_tokens, came_to[0])
        member.is_drafted = False
        signature = b""
        if payload is not None:
            signature = begin_plan(session, number, signing.digest(payload))
        encoded = session.native.plain_answer(
            number, came_to, payload, signature, session.pool.revision()
        )
        num_done = request.num_items if kind == "append" else 1
        answer = PlainAnswer(encoded, kind, num_done, payload is not None)
        if failures:
            answer = _with_failures(answer, member, failures)
        numbers.remember(request.content, answer.encoded)
        return answer

    def _later(
        self,
        member: Member,
        sharing: Sharing,
        request: PlainStep,
        failure: Failure,
        spent_s: float,
    ) -> PlainAnswer | None:
        """Answer an admission for which there is no room now, so that repeating it costs no more
        than the search for its prefix. Returns None when it was refused for another reason.
        """
        if failure[1] not in LATER:
            return None
        session = member.session
        pool, numbers = session.pool, session.numbers
        numbers.use()
        pool.statistics.allocation_s["admit"].add(spent_s)
        response = cpb.StepResponse(number=request.number)
        result = response.result
        must_wait = sharing.why_later(member, failure)
        shortage = shortage_of(session, failure, must_wait)
        result.results.add().failures.add(status=cpb.OPERATION_STATUS_LATER, shortage=shortage)
        run_to_end(finish_plan(member, request.number, result))
        result.usage.CopyFrom(pool.usage())
        result.revision = pool.revision()
        encoded = response.SerializeToString()
        numbers.remember(request.content, encoded)
        return PlainAnswer(encoded, "admit", 0, result.HasField("plan"), response)


def _with_failures(answer: PlainAnswer, member: Member, failures: list[Failure]) -> PlainAnswer:
    """Return the answer to an append of which some items were refused."""
    response = cpb.StepResponse.FromString(answer.encoded)
    (result,) = response.result.results
    add_failures(result, member, "operations[0].append", OPERATIONS["append"], failures)
    return answer._replace(encoded=response.SerializeToString(), response=response)


def _receipted(session: Session, request: PlainStep) -> list[int] | None:
    """Return the highest plan receipted by each shard, with the request's receipts. None unless
    each is of a plan in flight, and byte for byte what its data plane signs.
    """
    highest = list(session.receipted)
    for number, shard, payload, signature in request.receipts:
        if payload != session.receipt_of(number, shard):
            return None
        try:
            signing.verify(
                session.pool.key, signing.RECEIPT, signing.RECEIPT, payload, signature, field=""
            )
        except BadSignatureError:
            return None
        highest[shard] = max(highest[shard], number)
    return highest
