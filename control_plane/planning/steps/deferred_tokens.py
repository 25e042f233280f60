"""Deferred tokens: token ids of slots that were reserved without them.

All of a request's are checked before any is applied.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session
from control_plane.planning.steps import checks
from control_plane.planning.steps.publish import publish
from kvplane import columns
from kvplane.columns import INT32, INT64
from kvplane.errors import InvalidRequestError, SequenceNotFoundError
from kvplane.v1 import control_pb2 as cpb


class _Item(NamedTuple):
    sequence: Sequence
    first_position: int
    token_ids: bytes


def take_deferred_tokens(session: Session, message: cpb.DeferredTokens, max_items: int) -> None:
    """Add the tokens to their sequences; those known already are skipped.

    Raises InvalidRequestError or SequenceNotFoundError naming a column of ``deferred_tokens``; then
    none is added.
    """
    published: list[int] = []
    for sequence, first_position, token_ids in _read(session, message, max_items):
        num_repeated = sequence.num_tokens - first_position
        sequence.tokens += token_ids[num_repeated * 4 :]
        published += publish(session, sequence)
    session.pool.announce(session.root, published)


def _read(session: Session, message: cpb.DeferredTokens, max_items: int) -> list[_Item]:
    at = "deferred_tokens."
    num = columns.count(INT64, message.sequence_ids)
    if num > max_items:
        raise InvalidRequestError(
            f"must be at most {max_items} sequences, not {num}", field=f"{at}sequence_ids"
        )
    ids = columns.read(INT64, message.sequence_ids, f"{at}sequence_ids")
    admitted_by = columns.read(INT64, message.admitted_by, f"{at}admitted_by", length=num)
    firsts = columns.read(INT64, message.first_positions, f"{at}first_positions", length=num)
    num_tokens = columns.read(INT32, message.num_tokens, f"{at}num_tokens", length=num)
    checks.token_columns(num_tokens, message.token_ids, at_least=1, at=at)
    negative = checks.first_negative(message.token_ids)
    if negative is not None:
        raise InvalidRequestError("must not be negative", field=f"{at}token_ids[{negative}]")
    known: dict[int, int] = {}
    items: list[_Item] = []
    begin = 0
    for i, (sequence_id, step) in enumerate(zip(ids, admitted_by, strict=True)):
        sequence = session.sequence(sequence_id, field=f"{at}sequence_ids[{i}]")
        if step != sequence.admitted_by:
            raise SequenceNotFoundError(
                f"sequence {sequence_id} was admitted by step {sequence.admitted_by}, not {step}: "
                "leave out the tokens of the one that was freed",
                field=f"{at}admitted_by[{i}]",
            )
        end = begin + num_tokens[i]
        item = _Item(sequence, firsts[i], message.token_ids[begin * 4 : end * 4])
        known[sequence_id] = _check(item, known.get(sequence_id, sequence.num_tokens), i, begin)
        items.append(item)
        begin = end
    return items


def _check(item: _Item, num_known: int, i: int, begin: int) -> int:
    """Check the i-th item, whose tokens begin at index ``begin`` of the column; returns how many
    tokens of its sequence are known with them.
    """
    sequence, first, token_ids = item
    end = first + len(token_ids) // 4
    if not 0 <= first <= num_known:
        raise InvalidRequestError(
            f"must be from 0 to {num_known}, the first position whose token is not known",
            field=f"deferred_tokens.first_positions[{i}]",
        )
    if end > sequence.num_scheduled and end > num_known:
        raise InvalidRequestError(
            f"must end by position {sequence.num_scheduled}, where the slots end",
            field=f"deferred_tokens.num_tokens[{i}]",
        )
    if not token_ids.startswith(sequence.tokens[first * 4 : end * 4]):
        raise InvalidRequestError(
            f"differ from those known of sequence {sequence.id}",
            field=f"deferred_tokens.token_ids[{begin}]",
        )
    return max(num_known, end)
