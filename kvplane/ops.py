"""Builders of a step's operations, one each, whose columns they pack (``kvplane.wire.columns``).

A column is given as integers, an ``array``, or bytes that are packed already. Where an operation
takes many sequences, one integer stands for a column: of one sequence, or of the same number for
each of many. Every builder raises InvalidRequestError naming the column when an integer does not
fit its elements.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, Literal, Protocol

from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2


class Operation(Protocol):
    """One operation of a step, which callers pass on unread. At run time it is a message."""

    def SerializeToString(self) -> bytes:
        """Encode the operation as bytes."""


class DeferredTokens(Protocol):
    """Token ids of slots scheduled without them, passed on unread. At run time a message."""

    def SerializeToString(self) -> bytes:
        """Encode the tokens as bytes."""


Column = Iterable[int] | bytes
Numbers = int | Column
"""A column of numbers, or one number that holds for each sequence."""
Tokens = Column
"""Token ids as an int32 column."""
_OVER_INT32: Final = 1 << 31
_TIERS: Final = {"device": types_pb2.TIER_DEVICE, "host": types_pb2.TIER_HOST}


def admit(
    sequence_id: int,
    token_ids: Tokens,
    *,
    num_compute_tokens: int | None = None,
    max_total_tokens: int = 0,
    skip_prefix_lookup: bool = False,
    fork_sequence_ids: Numbers = (),
    wait: bool = False,
    ends_with_plan: bool = False,
    checkpoint_position: int = 0,
) -> Operation:
    """Start a sequence.

    ``num_compute_tokens``: uncached tokens that this step's plan computes, None for all.
    ``max_total_tokens``: the most that the sequence will ever have, prompt included; 0 means the
    prompt alone. ``fork_sequence_ids``: further sequences of the same prompt, started with it.
    ``wait``: whether to wait in the queue when there is no room now. ``ends_with_plan``: whether
    the sequence ends by itself once the step's plan has its receipt or is aborted.
    ``checkpoint_position``: in a layout with states, after how many tokens the plan keeps a
    checkpoint, if it computes to there and a block is left: a multiple of the block size; 0 for
    none.
    """
    for field, number in (
        ("num_compute_tokens", num_compute_tokens or 0),
        ("max_total_tokens", max_total_tokens),
        ("checkpoint_position", checkpoint_position),
    ):
        if not -_OVER_INT32 <= number < _OVER_INT32:
            raise InvalidRequestError("must be an integer of 32 bits", field=field)
    return pb.Operation(
        admit=pb.Admit(
            sequence_id=sequence_id,
            token_ids=pack_tokens(token_ids),
            num_compute_tokens=num_compute_tokens,
            max_total_tokens=max_total_tokens,
            skip_prefix_lookup=skip_prefix_lookup,
            fork_sequence_ids=pack_each(INT64, fork_sequence_ids, "fork_sequence_ids"),
            wait=wait,
            ends_with_plan=ends_with_plan,
            checkpoint_position=checkpoint_position,
        )
    )


def append(
    sequence_ids: Numbers,
    token_ids: Tokens = (),
    num_slots: Numbers = 0,
    *,
    first_positions: Numbers,
    num_tokens: Numbers | None = None,
    num_lookahead_slots: Numbers = 0,
    checkpoint_positions: Numbers = 0,
) -> Operation:
    """Add known tokens to sequences, and compute positions [first_position, first_position +
    num_slots) of each.

    ``token_ids``: the tokens of all of them, sequence after sequence. ``first_positions``: the
    number of positions of each that were scheduled so far. ``num_tokens``: how many of the tokens
    are each sequence's; None, of one sequence, for all. ``num_lookahead_slots``: slots to allocate
    blocks for after the computed ones. ``checkpoint_positions``: in a layout with states, after how
    many tokens of each the plan keeps a checkpoint, a multiple of the block size in what it
    computes; 0 for none. Raises InvalidRequestError if several sequences are given tokens without
    ``num_tokens``.
    """
    ids, tokens = pack_each(INT64, sequence_ids, "sequence_ids"), pack_tokens(token_ids)
    num = columns.count(INT64, ids)
    if num_tokens is None:
        if tokens and num != 1:
            raise InvalidRequestError("must be given for several sequences", field="num_tokens")
        num_tokens = columns.count(INT32, tokens)

    def optional(values: Numbers, field: str) -> bytes:
        if isinstance(values, int) and not values:
            return b""
        return pack_each(INT32, values, field, num)

    return pb.Operation(
        append=pb.Append(
            sequence_ids=ids,
            first_positions=pack_each(INT32, first_positions, "first_positions", num),
            num_slots=pack_each(INT32, num_slots, "num_slots", num),
            num_tokens=pack_each(INT32, num_tokens, "num_tokens", num),
            token_ids=tokens,
            num_lookahead_slots=optional(num_lookahead_slots, "num_lookahead_slots"),
            checkpoint_positions=optional(checkpoint_positions, "checkpoint_positions"),
        )
    )


def truncate(sequence_ids: Numbers, num_tokens: Numbers) -> Operation:
    """Drop all positions of sequences but the first ``num_tokens`` of each."""
    ids = pack_each(INT64, sequence_ids, "sequence_ids")
    num = columns.count(INT64, ids)
    return pb.Operation(
        truncate=pb.Truncate(
            sequence_ids=ids, num_tokens=pack_each(INT32, num_tokens, "num_tokens", num)
        )
    )


def fork(parent_sequence_ids: Numbers, sequence_ids: Numbers) -> Operation:
    """Start sequences, each of which shares all blocks of its parent."""
    ids = pack_each(INT64, sequence_ids, "sequence_ids")
    num = columns.count(INT64, ids)
    return pb.Operation(
        fork=pb.Fork(
            parent_sequence_ids=pack_each(INT64, parent_sequence_ids, "parent_sequence_ids", num),
            sequence_ids=ids,
        )
    )


def free(sequence_ids: Numbers) -> Operation:
    """End sequences."""
    return pb.Operation(free=pb.Free(sequence_ids=pack_each(INT64, sequence_ids, "sequence_ids")))


def swap(sequence_ids: Numbers, tier: Literal["device", "host"]) -> Operation:
    """Move sequences, which are in the other tier, to ``tier``, all or none."""
    if tier not in _TIERS:
        raise InvalidRequestError('must be "device" or "host"', field="tier")
    column = pack_each(INT64, sequence_ids, "sequence_ids")
    return pb.Operation(swap=pb.Swap(sequence_ids=column, tier=_TIERS[tier]))


def pin(pin_ids: Numbers, prompts: Sequence[Tokens]) -> Operation:
    """Hold the cached blocks of prompts for reading, in either tier, with no sequence and no plan.
    ``pin_ids``: the caller's id of each prompt's pin.

    Each prompt is looked up by itself; where nothing is cached no pin begins. A pin ends with
    ``unpin``, with its session, and by itself after as long as a lease.
    """
    tokens = [pack_tokens(each) for each in prompts]
    return pb.Operation(
        pin=pb.Pin(
            pin_ids=pack_each(INT64, pin_ids, "pin_ids"),
            num_tokens=columns.pack(INT32, [columns.count(INT32, each) for each in tokens]),
            token_ids=b"".join(tokens),
        )
    )


def unpin(pin_ids: Numbers) -> Operation:
    """End pins. Those that have ended are passed over."""
    return pb.Operation(unpin=pb.Unpin(pin_ids=pack_each(INT64, pin_ids, "pin_ids")))


def deferred_tokens(
    sequence_ids: Numbers,
    admitted_by: Numbers,
    first_positions: Numbers,
    num_tokens: Numbers,
    token_ids: Tokens,
) -> DeferredTokens:
    """Give the token ids of positions that earlier appends scheduled without them; columns as in
    ``append``.

    ``admitted_by``: the number of the step that admitted or forked each sequence, which is
    ``Session.last_number`` after that step.
    """
    ids = pack_each(INT64, sequence_ids, "sequence_ids")
    num = columns.count(INT64, ids)
    return pb.DeferredTokens(
        sequence_ids=ids,
        admitted_by=pack_each(INT64, admitted_by, "admitted_by", num),
        first_positions=pack_each(INT32, first_positions, "first_positions", num),
        num_tokens=pack_each(INT32, num_tokens, "num_tokens", num),
        token_ids=pack_tokens(token_ids),
    )


def pack_tokens(token_ids: Tokens) -> bytes:
    """Pack token ids into an int32 column."""
    return pack(INT32, token_ids, "token_ids")


def pack_each(kind: str, values: Numbers, field: str, num: int = 1) -> bytes:
    """Pack numbers into a column; a single integer stands for ``num`` equal elements."""
    if isinstance(values, Iterable):
        return pack(kind, values, field)
    return pack(kind, [values], field) * num


def pack(kind: str, values: Column | array[int], field: str) -> bytes:
    """Pack ``values`` into a column of elements of ``kind`` (``kvplane.wire.columns``)."""
    if isinstance(values, bytes):
        return values
    try:
        return columns.pack(kind, values)
    except (OverflowError, TypeError) as error:
        bits = 8 * array(kind).itemsize
        raise InvalidRequestError(f"must be integers of {bits} bits", field=field) from error
