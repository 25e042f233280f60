"""Aborting plans that have not run, or may have run in part.

Each sequence is cut to what receipts say was written, so every plan in flight loses its spans: all
are aborted together. Their transfers are undone: tables refer to the sources again, which were
pinned for this, in place of the copies. Forks and frees stay. The data plane learns of the abort
from the next plan, which carries all tables whole; until that has run, blocks released here stay
retired.
"""

from __future__ import annotations

from typing import Final

from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session
from control_plane.planning.steps.checks import div_ceil
from control_plane.planning.steps.plan_columns import Ref
from kvplane.errors import InvalidRequestError, PlanReceiptedError
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE


def abort_from(session: Session, plan_number: int) -> None:
    """Abort plan ``plan_number`` and all in flight with it.

    Raises PlanReceiptedError when it has run, InvalidRequestError when no plan has that number.
    """
    if not 0 < plan_number < session.numbers.last:
        raise InvalidRequestError("is not the number of a plan", field="plan_number")
    if session.is_voided(plan_number):
        return
    if plan_number <= session.done:
        raise PlanReceiptedError(
            f"plan {plan_number} has run: what it wrote stays", field="plan_number"
        )
    if any(number >= plan_number for number in session.plans):
        abort_plans(session, next_plan=session.numbers.last + 1)


def abort_plans(session: Session, *, next_plan: int) -> None:
    """Cut every sequence to what is written; the next plan, numbered ``next_plan`` or higher,
    carries all tables whole.
    """
    origins: dict[Ref, Ref] = {}
    for record in session.plans.values():
        record.transfers.trace(origins)
    for sequence in session.sequences.values():
        _cut(session, sequence, origins, next_plan)
    for record in session.plans.values():
        session.unpin(record, next_plan)
        session.void(record.number)
    session.plans.clear()
    session.resync_due = True


def _cut(session: Session, sequence: Sequence, origins: dict[Ref, Ref], next_plan: int) -> None:
    sequence.cut()
    old_tier, old_table = sequence.tier, sequence.table
    kept = old_table[: div_ceil(sequence.num_written, session.pool.block_size)]
    generations = session.pool.tiers[old_tier].generations(kept)
    refs = [
        origins.get((old_tier, block, generation), (old_tier, block, generation))
        for block, generation in zip(kept, generations, strict=True)
    ]
    # An empty table is in no tier; it can grow on the device.
    sequence.tier = refs[0][0] if refs else _DEVICE
    sequence.table = [block for _, block, _ in refs]
    if sequence.moved_by > session.done:
        sequence.moved_by = 0
    session.share(sequence.tier, sequence.table)
    session.release(old_tier, old_table[::-1], next_plan)
