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


def abort_from(session: Session, plan_number: int) -> Slices[None]:
    """Abort plan ``plan_number`` and all in flight with it, some blocks at a time.

    Raises PlanReceiptedError when it has run, InvalidRequestError when no plan has that number.
    """
    if session.is_voided(plan_number):
        return
    if 0 < plan_number <= session.done:
        raise PlanReceiptedError(
            f"plan {plan_number} has run: what it wrote stays", field="plan_number"
        )
    if plan_number not in session.plans:
        raise InvalidRequestError("is not the number of a plan", field="plan_number")
    yield from abort_plans(session, next_plan=session.numbers.last + 1)


def abort_plans(session: Session, *, next_plan: int, keeps_tables: bool = True) -> Slices[None]:
    """Cut every sequence to its written tokens. The next plan, numbered ``next_plan`` or higher,
    says what all tables are; unless ``keeps_tables``, it contains all of them whole.
    """
    for number in session.plans:
        session.void(number)
    session.plans.clear()
    while session.native.abort(session.handle, next_plan, keeps_tables, SLICE_ENTRIES):
        yield
