"""Converts the native core's failures of items into messages."""

from __future__ import annotations

from typing import Final, cast

from google.protobuf import duration_pb2
from kvplane_blocks import ColumnError, _native

from control_plane.admission.decisions import MustWait, Reason
from control_plane.sessions.session import Session
from control_plane.steps.operation import Failure, Refusable
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    PositionMismatchError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceExistsError,
    SequenceNotFoundError,
    SequenceRevokedError,
    SequenceSwappedError,
)
from kvplane.wire.error_messages import to_wire
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

# About as long as a step takes on a busy engine: receipts come with steps.
RETRY_DELAY: Final = duration_pb2.Duration(nanos=50_000_000)
_TIER_NAMES: Final = {tpb.TIER_DEVICE: "device", tpb.TIER_HOST: "host"}
_REASONS: Final = {
    _native.LATER: cpb.SHORTAGE_REASON_BLOCKS,
    _native.LATER_HEADROOM: cpb.SHORTAGE_REASON_HEADROOM,
    _native.LATER_QUOTA: cpb.SHORTAGE_REASON_QUOTA,
    _native.NEVER_QUOTA: cpb.SHORTAGE_REASON_QUOTA,
}
_NEVER: Final = (_native.NEVER, _native.NEVER_QUOTA)
_WAIT_REASONS: Final = {
    Reason.QUEUE: cpb.SHORTAGE_REASON_QUEUE,
    Reason.GROWTH: cpb.SHORTAGE_REASON_GROWTH,
}


def add_failures(
    result: cpb.OperationResult,
    session: Session,
    at: str,
    operation: Refusable,
    failures: list[Failure],
) -> None:
    """Add to ``result`` the items that the core refused. ``at``: the operation's field in the
    request, such as "operations[2].append".
    """
    for failure in failures:
        item = 0 if operation.is_one_item else failure[0]
        status = shortage_status(failure)
        if status is not None:
            shortage = shortage_of(session, failure)
            result.failures.add(item=item, status=status, shortage=shortage)
        else:
            error = error_of(session, operation, failure)
            field, index = operation.located(error.field, failure)
            _add(result, item, error, f"{at}.{field}" + ("" if index is None else f"[{index}]"))


def add_error(result: cpb.OperationResult, at: str, error: KvplaneError) -> None:
    """Add to ``result`` that a whole operation failed; the error's field is relative to it."""
    _add(result, 0, error, f"{at}.{error.field}" if error.field else at)


def error_of_columns(error: ColumnError, *, at: str = "") -> InvalidRequestError:
    """Return the error for a column that the core cannot read. ``at`` prefixes its name."""
    column, index, text = error.args
    return InvalidRequestError(text, field=f"{at}{column}" + (f"[{index}]" if index >= 0 else ""))


def shortage_status(failure: Failure) -> cpb.ItemStatus | None:
    """Return LATER or NEVER for an item that lacks room; None for an item that is wrong."""
    if failure[1] in _NEVER:
        return cpb.ITEM_STATUS_NEVER
    return cpb.ITEM_STATUS_LATER if failure[1] in _REASONS else None


def shortage_of(
    session: Session,
    failure: Failure,
    must_wait: MustWait | None = None,
    num_headroom: int = 0,
) -> cpb.Shortage:
    """Describe which blocks an item lacks. ``must_wait``: why the queue has the operation wait, if
    so. ``num_headroom``: blocks that the operation then has to leave free.
    """
    _, code, num_needed, num_available, tier = failure
    shortage = cpb.Shortage(
        tier=cast(tpb.Tier, tier),
        num_blocks_needed=num_needed,
        num_blocks_available=num_available,
        reason=_REASONS.get(code, cpb.SHORTAGE_REASON_BLOCKS),
    )
    if code not in _NEVER:
        if code != _native.LATER_QUOTA:
            shortage.num_blocks_pending = session.native.num_pending(session.handle, tier)
        shortage.retry_delay.CopyFrom(RETRY_DELAY)
    if must_wait is not None:
        # The core was asked with more headroom than there is, to learn what is needed.
        num_obtainable = session.native.num_obtainable(session.handle, tier)
        shortage.num_blocks_available = max(0, num_obtainable - num_headroom)
        shortage.queue_position = must_wait.position
        if must_wait.position:  # asking again does not help
            shortage.ClearField("retry_delay")
        if must_wait.reason in _WAIT_REASONS:
            shortage.reason = _WAIT_REASONS[must_wait.reason]
        elif num_needed <= num_obtainable:
            shortage.reason = cpb.SHORTAGE_REASON_HEADROOM
        else:
            shortage.reason = _REASONS[code]
    return shortage


def error_of(session: Session, operation: Refusable, failure: Failure) -> KvplaneError:
    """Return the error that says why an item is wrong; its field is a column of the operation."""
    _, code, a, b, c = failure
    ids, parents = operation.id_field, operation.parent_field
    match code:
        case _native.NOT_FOUND if a in session.revoked:
            return SequenceRevokedError(f"sequence {a} was cut: admit it again", field=parents)
        case _native.NOT_FOUND:
            return SequenceNotFoundError(f"sequence {a} is not live: admit it first", field=parents)
        case _native.EXISTS if operation.names_each_once:
            return InvalidRequestError("must be one or more distinct ids", field=ids)
        case _native.EXISTS:
            return SequenceExistsError(
                f"{operation.noun} {a} is live already: end it, or take another id", field=ids
            )
        case _native.BAD_ID:
            return InvalidRequestError("must be from 1 to 2^63 - 1", field=ids)
        case _native.BUSY if operation.computes:
            return InvalidRequestError(
                f"sequence {a} already computes tokens in this step", field="num_slots"
            )
        case _native.BUSY:
            return SequenceBusyError(
                f"sequence {a} computes tokens in this step: wait for the next", field=parents
            )
        case _native.SWAPPED:
            text = f"sequence {a} is on the {_TIER_NAMES[cast(tpb.Tier, b)]} tier"
            text += ": swap it in first" if operation.computes else " already"
            return SequenceSwappedError(text, field=ids)
        case _native.TOO_MANY_SEQUENCES:
            return QuotaExceededError(f"{a} sequences are live: free one first", field=ids)
        case _native.TOO_MANY_ENTRIES:
            return QuotaExceededError(
                f"the session's block tables have {b} entries, and may have {a}, {c} more are "
                "needed: free sequences first",
                field=ids,
            )
        case _native.TOO_MANY_PINNED:
            return QuotaExceededError(
                f"the session has {b} blocks pinned, and may have {a}, {c} more are needed: unpin "
                "some first",
                field=ids,
            )
    return _position_error(operation, failure)


def _position_error(operation: Refusable, failure: Failure) -> KvplaneError:
    """Return the error for positions or tokens that do not fit the sequence."""
    _, code, a, b, c = failure
    match code:
        case _native.POSITION:
            return PositionMismatchError(
                f"the next slot of sequence {a} is at position {b}, not {c}: ListSequences "
                "tells its positions",
                field="first_positions",
            )
        case _native.NEGATIVE:
            column = ("num_slots", "token_ids", "num_lookahead_slots", "num_tokens")[a]
            return InvalidRequestError(_NEGATIVE.get(column, "must not be negative"), field=column)
        case _native.TOO_LONG:
            return InvalidRequestError(
                f"must be at most {b}, the positions of sequence {a}", field="num_tokens"
            )
        case _native.TRIMMED:
            return InvalidRequestError(
                f"positions of sequence {a} before {b} were freed: behind the attention window, or "
                "before its checkpoint",
                field="num_tokens",
            )
        case _native.CHECKPOINT:
            return InvalidRequestError(
                f"must be 0, or a multiple of the block size above {b} and up to {c}, in a layout "
                "with states",
                field="checkpoint_positions",
            )
        case _native.NOT_KNOWN:
            return InvalidRequestError(
                f"must be from 0 to {b}, the first position whose token is not known",
                field="first_positions",
            )
        case _native.OTHER_ADMISSION:
            return SequenceNotFoundError(
                f"sequence {a} was admitted by step {b}, not {c}: leave out the tokens of the one "
                "that was freed",
                field="admitted_by",
            )
        case _native.BEYOND_SLOTS:
            return InvalidRequestError(
                f"must end by position {b}, where the slots end", field="num_tokens"
            )
        case _native.OTHER_TOKENS:
            return InvalidRequestError(
                f"differ from those known of sequence {a}, or given here before", field="token_ids"
            )
    raise AssertionError(f"the native core refuses an item of {operation.name} with code {code}")


_NEGATIVE: Final = {
    "token_ids": "must not hold negative values",
    "num_tokens": "must be at least 1",
}


def _add(result: cpb.OperationResult, item: int, error: KvplaneError, field: str) -> None:
    wire = to_wire(error)
    wire.field = field
    result.failures.add(item=item, status=cpb.ITEM_STATUS_FAILED, error=wire)
