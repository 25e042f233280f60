"""What the caller tells of the past: receipts of plans that ran, and tokens that came late.

Both are validated as a whole before anything changes. A data plane runs a session's plans in order
and refuses one whose predecessor has not run, so the receipt of a plan stands for all before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.planning import checks
from control_plane.planning.model import LateTokens, Receipt
from control_plane.planning.publish import publish
from control_plane.planning.session import Session
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    StaleEpochError,
    StaleIncarnationError,
)


def validate_receipts(session: Session, receipts: Sequence[Receipt], incarnation: int) -> list[int]:
    """The highest plan that each shard has run, these receipts included. Changes nothing.

    Raises BadSignatureError, StaleEpochError or StaleIncarnationError naming ``receipts[i]``.
    """
    highest = list(session.receipted)
    epochs = session.pool.epochs if receipts else ()
    for i, receipt in enumerate(receipts):
        at = f"receipts[{i}]"
        if receipt.session_id != session.id:
            raise BadSignatureError("is another session's", field=f"{at}.session_id")
        if receipt.incarnation != incarnation:
            raise StaleIncarnationError("is of another control plane", field=f"{at}.incarnation")
        if not 0 <= receipt.shard_index < len(epochs):
            raise BadSignatureError("is no shard of the pool", field=f"{at}.shard_index")
        if receipt.epoch != epochs[receipt.shard_index]:
            raise StaleEpochError("is of another process", field=f"{at}.epoch")
        if not 0 < receipt.plan_number <= session.last_number:
            raise BadSignatureError("is of no plan made", field=f"{at}.plan_number")
        record = session.plans.get(receipt.plan_number)
        if record is None:
            continue  # receipted or aborted before
        if receipt.plan_digest != record.digest:
            raise BadSignatureError("is of another plan", field=f"{at}.plan_digest")
        highest[receipt.shard_index] = max(highest[receipt.shard_index], receipt.plan_number)
    return highest


def apply_receipts(session: Session, highest: list[int]) -> None:
    """Let the plans that every shard has run take effect."""
    session.receipted = highest
    done = min(highest)
    if done <= session.done:
        return
    session.done = done
    published: list[int] = []
    finished = [session.plans.pop(n) for n in list(session.plans) if n <= done]
    live = session.sequences
    block_size = session.pool.block_size
    for record in finished:
        for sequence in record.touched:
            if live.get(sequence.id) is sequence or sequence.generations is not None:
                sequence.written_up_to(done)
                if sequence.num_complete(block_size) > sequence.num_published:
                    published += publish(session, sequence)
    session.pool.announce(session.tenant, published)
    for store in session.pool.tiers.values():
        store.plans_finished(session.id, done)
        for record in finished:
            store.unpin([block for owner, block in reversed(record.pins) if owner is store])


def num_in_flight(session: Session, highest: list[int]) -> int:
    """Plans that would still be unreceipted once ``highest`` is applied."""
    done = min(highest)
    return sum(number > done for number in session.plans)


def validate_late_tokens(session: Session, late_tokens: Sequence[LateTokens]) -> None:
    """Raise InvalidRequestError or SequenceNotFoundError naming ``late_tokens[i]``."""
    known: dict[int, int] = {}
    for i, late in enumerate(late_tokens):
        at = f"late_tokens[{i}]"
        sequence = session.sequence(late.sequence_id, field=f"{at}.sequence_id")
        checks.token_ids(late.token_ids, at_least=1, field=f"{at}.token_ids")
        checks.count(late.first_position, field=f"{at}.first_position")
        num_known = known.get(sequence.id, sequence.num_tokens)
        end = late.first_position + len(late.token_ids) // 4
        if late.first_position > num_known:
            raise InvalidRequestError(
                f"must be {num_known}, the first position whose token is not known",
                field=f"{at}.first_position",
            )
        if end > sequence.num_scheduled and end > num_known:
            raise InvalidRequestError(
                f"must end by {sequence.num_scheduled}, where the slots end",
                field=f"{at}.token_ids",
            )
        old = sequence.tokens[late.first_position * 4 : end * 4]
        if not late.token_ids.startswith(old):
            raise InvalidRequestError("differ from those known", field=f"{at}.token_ids")
        known[sequence.id] = max(num_known, end)


def apply_late_tokens(session: Session, late_tokens: Sequence[LateTokens]) -> None:
    """Let the tokens be known; those known before are passed over."""
    published: list[int] = []
    for late in late_tokens:
        sequence = session.sequences[late.sequence_id]
        num_repeated = sequence.num_tokens - late.first_position
        sequence.tokens += late.token_ids[num_repeated * 4 :]
        published += publish(session, sequence)
    session.pool.announce(session.tenant, published)
