"""Aborting plans that have not run, or may have run in part.

Each sequence is cut to what receipts say was written, so every plan in flight loses its spans: all
are aborted together. Their transfers are undone: tables refer to the sources again, which were
pinned for this, in place of the copies. Forks and frees stay. The data plane learns of the abort
from the next plan, which says what all tables are: entries that the data plane has are named, not
sent again. Until that plan has run, blocks released here stay retired.
"""

from __future__ import annotations

from control_plane.sessions.session import Session
from control_plane.steps.slices import SLICE_ENTRIES
from kvplane.errors import InvalidRequestError, PlanReceiptedError
from kvplane.slices import Slices
from kvplane.wire.v1 import session_pb2 as cpb


def abort_plans(session: Session, request: cpb.AbortPlansRequest) -> Slices[None]:
    """Abort all plans in flight, by cutting every sequence to its written tokens, some blocks in
    each slice. The next plan states all tables; with ``whole_tables`` it is this request's plan,
    and contains each table whole.

    Raises PlanReceiptedError when the plan that the request names has run, InvalidRequestError when
    no plan has that number.
    """
    plan_number, keeps_tables = request.plan_number, not request.whole_tables
    if session.is_voided(plan_number):
        if keeps_tables:
            return
    elif plan_number:
        if 0 < plan_number <= session.done:
            raise PlanReceiptedError(
                f"plan {plan_number} has run: what it wrote stays", field="plan_number"
            )
        if plan_number not in session.plans:
            raise InvalidRequestError("is not the number of a plan", field="plan_number")
    for number in session.plans:
        session.void(number)
    session.drop_plans([*session.plans])
    next_plan = request.number + (1 if keeps_tables else 0)
    while session.native.abort(session.handle, next_plan, keeps_tables, SLICE_ENTRIES):
        yield
