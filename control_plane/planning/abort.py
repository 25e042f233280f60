"""Aborting plans that have not run, or may have run in part.

Each sequence is cut to what receipts say was written, so every plan in flight loses its rows: all
are aborted together. Their transfers are undone: a table goes back from copies to the sources,
which were pinned for this. Forks and frees stay. The data plane learns of it by the next plan,
which carries all tables whole; until that has run, blocks released here stay retired.
"""

from __future__ import annotations

from control_plane.planning.checks import div_ceil
from control_plane.planning.model import BlockRef, Tier
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session
from kvplane.errors import InvalidRequestError, PlanReceiptedError


def abort_plan(session: Session, plan_number: int) -> None:
    """Abort plan ``plan_number`` and all in flight with it.

    Raises PlanReceiptedError when it has run, InvalidRequestError when it was never made.
    """
    if not 0 < plan_number <= session.last_number:
        raise InvalidRequestError("is of no plan made", field="plan_number")
    if session.is_voided(plan_number):
        return
    if plan_number <= session.done:
        raise PlanReceiptedError(f"plan {plan_number} has run", field="plan_number")
    if any(number >= plan_number for number in session.plans):
        abort_plans(session)


def abort_plans(session: Session) -> None:
    """Cut every sequence to what is written; the next plan is one of whole tables."""
    next_plan = session.last_number + 1
    origins: dict[BlockRef, BlockRef] = {}
    for record in session.plans.values():
        for transfer in record.transfers:
            origin = origins.get(transfer.source, transfer.source)
            origins[transfer.destination] = origin
    for sequence in session.sequences.values():
        _cut(session, sequence, origins, next_plan)
    for record in session.plans.values():
        session.unpin(record, next_plan)
        session.void(record.number)
    session.plans.clear()
    session.resync_due = True


def _cut(
    session: Session, sequence: Sequence, origins: dict[BlockRef, BlockRef], next_plan: int
) -> None:
    sequence.cut()
    num_kept = div_ceil(sequence.num_written, session.pool.block_size)
    refs = [session.pool.ref(sequence.tier, block) for block in sequence.table[:num_kept]]
    refs = [origins.get(ref, ref) for ref in refs]
    old_tier, old_table = sequence.tier, sequence.table
    # An empty table is nowhere; the device tier is where it can grow.
    sequence.tier = refs[0].tier if refs else Tier.DEVICE
    sequence.table = [ref.index for ref in refs]
    if sequence.moved_by > session.done:
        sequence.moved_by = 0
    session.share(sequence.tier, sequence.table)
    session.release(old_tier, old_table[::-1], next_plan)
