"""Builders of a step's operations, whose columns they pack (see ``kvplane.columns``).

A column is given as integers, an ``array``, or bytes that are packed already. Every builder raises
InvalidRequestError naming the column when an integer does not fit its elements.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvplane import columns
from kvplane.columns import INT32, INT64
from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as pb

Column = Iterable[int] | bytes
Tokens = Column
"""Token ids: an int32 column."""


def admit(
    sequence_id: int,
    token_ids: Tokens,
    *,
    num_compute_tokens: int | None = None,
    max_total_tokens: int = 0,
    skip_prefix_lookup: bool = False,
) -> pb.Operation:
    """Start a sequence.

    ``num_compute_tokens``: uncached tokens that this step's plan computes, None for all.
    ``max_total_tokens``: the most that the sequence will ever have, prompt included; 0 means the
    prompt alone.
    """
    return pb.Operation(
        admit=pb.Admit(
            sequence_id=sequence_id,
            token_ids=pack_tokens(token_ids),
            num_compute_tokens=num_compute_tokens,
            max_total_tokens=max_total_tokens,
            skip_prefix_lookup=skip_prefix_lookup,
        )
    )


def append(
    sequence_id: int, token_ids: Tokens = (), num_slots: int = 0, *, first_position: int
) -> pb.Operation:
    """Add known tokens to one sequence and compute positions [first_position, first_position +
    num_slots).

    ``first_position``: the number of positions scheduled so far.
    """
    packed = pack_tokens(token_ids)
    num_tokens = columns.count(INT32, packed)
    return appends([sequence_id], [first_position], [num_slots], [num_tokens], packed)


def appends(
    sequence_ids: Column,
    first_positions: Column,
    num_slots: Column,
    num_tokens: Column,
    token_ids: Tokens,
) -> pb.Operation:
    """As ``append`` for many sequences: each column has an element for each of them, ``token_ids``
    has their tokens, sequence after sequence.
    """
    return pb.Operation(
        append=pb.Append(
            sequence_ids=_pack(INT64, sequence_ids, "sequence_ids"),
            first_positions=_pack(INT64, first_positions, "first_positions"),
            num_slots=_pack(INT32, num_slots, "num_slots"),
            num_tokens=_pack(INT32, num_tokens, "num_tokens"),
            token_ids=pack_tokens(token_ids),
        )
    )


def fork(parent_sequence_id: int, sequence_id: int) -> pb.Operation:
    """Start ``sequence_id`` as a sequence that shares all blocks of its parent."""
    return forks([parent_sequence_id], [sequence_id])


def forks(parent_sequence_ids: Column, sequence_ids: Column) -> pb.Operation:
    """As ``fork`` for many sequences; the columns have an element for each new one."""
    return pb.Operation(
        fork=pb.Fork(
            parent_sequence_ids=_pack(INT64, parent_sequence_ids, "parent_sequence_ids"),
            sequence_ids=_pack(INT64, sequence_ids, "sequence_ids"),
        )
    )


def free(sequence_ids: Column) -> pb.Operation:
    """End sequences."""
    return pb.Operation(free=pb.Free(sequence_ids=_pack(INT64, sequence_ids, "sequence_ids")))


def swap_out(sequence_ids: Column) -> pb.Operation:
    """Move sequences to the host tier, all or none."""
    column = _pack(INT64, sequence_ids, "sequence_ids")
    return pb.Operation(swap_out=pb.SwapOut(sequence_ids=column))


def swap_in(sequence_ids: Column) -> pb.Operation:
    """Move sequences back to the device tier, all or none."""
    column = _pack(INT64, sequence_ids, "sequence_ids")
    return pb.Operation(swap_in=pb.SwapIn(sequence_ids=column))


def deferred_tokens(
    sequence_ids: Column,
    admitted_by: Column,
    first_positions: Column,
    num_tokens: Column,
    token_ids: Tokens,
) -> pb.DeferredTokens:
    """Tokens of positions that earlier appends reserved, in columns as those of ``appends``.

    ``admitted_by``: the number of the step that admitted or forked each sequence, which is
    ``Session.last_number`` after that step.
    """
    return pb.DeferredTokens(
        sequence_ids=_pack(INT64, sequence_ids, "sequence_ids"),
        admitted_by=_pack(INT64, admitted_by, "admitted_by"),
        first_positions=_pack(INT64, first_positions, "first_positions"),
        num_tokens=_pack(INT32, num_tokens, "num_tokens"),
        token_ids=pack_tokens(token_ids),
    )


def pack_tokens(token_ids: Tokens) -> bytes:
    """The column of ``token_ids``."""
    return _pack(INT32, token_ids, "token_ids")


def _pack(kind: str, values: Column | array[int], field: str) -> bytes:
    if isinstance(values, bytes):
        return values
    try:
        return columns.pack(kind, values)
    except (OverflowError, TypeError) as error:
        bits = 8 * array(kind).itemsize
        raise InvalidRequestError(f"must be integers of {bits} bits", field=field) from error
