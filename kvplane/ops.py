"""The operations of a step, and token ids as they travel: packed little-endian int32 values."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as pb

Tokens = Sequence[int] | bytes


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


def append(sequence_id: int, token_ids: Tokens = (), num_slots: int = 0) -> pb.Operation:
    """Add known tokens to a sequence and compute the next ``num_slots`` positions."""
    return pb.Operation(
        append=pb.Append(
            sequence_id=sequence_id, token_ids=pack_tokens(token_ids), num_slots=num_slots
        )
    )


def fork(parent_sequence_id: int, sequence_id: int) -> pb.Operation:
    """Start ``sequence_id`` as a sequence that shares all blocks of its parent."""
    return pb.Operation(
        fork=pb.Fork(parent_sequence_id=parent_sequence_id, sequence_id=sequence_id)
    )


def free(sequence_id: int) -> pb.Operation:
    """End a sequence."""
    return pb.Operation(free=pb.Free(sequence_id=sequence_id))


def swap_out(sequence_ids: Iterable[int]) -> pb.Operation:
    """Move sequences to the host tier."""
    return pb.Operation(swap_out=pb.SwapOut(sequence_ids=sequence_ids))


def swap_in(sequence_ids: Iterable[int]) -> pb.Operation:
    """Move sequences back to the device tier."""
    return pb.Operation(swap_in=pb.SwapIn(sequence_ids=sequence_ids))


def late_tokens(sequence_id: int, first_position: int, token_ids: Tokens) -> pb.LateTokens:
    """Tokens of positions that an earlier append reserved, from ``first_position`` on."""
    return pb.LateTokens(
        sequence_id=sequence_id, first_position=first_position, token_ids=pack_tokens(token_ids)
    )


def pack_tokens(token_ids: Tokens) -> bytes:
    """4 bytes a token; bytes pass as they are. Raises InvalidRequestError when one is no int32."""
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError("must be integers of 32 bits", field="token_ids") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(token_ids: bytes, *, field: str = "token_ids") -> list[int]:
    """The inverse of ``pack_tokens``. Raises InvalidRequestError naming ``field``."""
    unpacked = array("i")
    try:
        unpacked.frombytes(token_ids)
    except ValueError as error:
        raise InvalidRequestError("must be 4 bytes a token", field=field) from error
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
