"""Deferred tokens: token ids of slots that were reserved without them.

All of a request's are checked before any is applied.
"""

from __future__ import annotations

from kvplane_blocks import ColumnError

from control_plane.planning.session import Session
from control_plane.planning.steps.failures import error_of, error_of_columns
from kvplane import columns
from kvplane.columns import INT32, INT64
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as cpb


def take_deferred_tokens(session: Session, message: cpb.DeferredTokens, max_items: int) -> None:
    """Add the tokens to their sequences; those known already are skipped.

    Raises InvalidRequestError or SequenceNotFoundError naming a column of ``deferred_tokens``; then
    none is added.
    """
    num = columns.count(INT64, message.sequence_ids)
    if num > max_items:
        raise InvalidRequestError(
            f"must be at most {max_items} sequences, not {num}",
            field="deferred_tokens.sequence_ids",
        )
    try:
        failure = session.native.deferred_tokens(
            session.slot,
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
    item = failure[0]
    error = error_of(session, "deferred_tokens", failure)
    if error.field == "token_ids":  # its index is that of the item's first token
        num_tokens = columns.read(INT32, message.num_tokens, "num_tokens")
        item = sum(num_tokens[:item])
    raise type(error)(error.message, field=f"deferred_tokens.{error.field}[{item}]")
