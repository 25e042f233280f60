"""Deferred tokens: token ids of slots that were reserved without them.

All tokens of a request are checked before any is applied.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from itertools import accumulate

from kvplane_blocks import ColumnError

from control_plane.sessions.session import Session
from control_plane.steps.failures import error_of, error_of_columns
from control_plane.steps.operations import DEFERRED_TOKENS
from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as cpb


def take_deferred_tokens(session: Session, message: cpb.DeferredTokens, max_items: int) -> None:
    """Add token ids to sequences whose slots were scheduled without them; ids that are known
    already are skipped.

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
