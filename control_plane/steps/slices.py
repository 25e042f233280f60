"""Work that takes long, in slices: others' requests run in between.

A generator yields after each slice, of a millisecond or a few, and returns what the work came to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from typing import Final, TypeVar

from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as cpb
from kvplane.wire import columns
from kvplane.wire.columns import INT32

T = TypeVar("T")
Slices = Generator[None, None, T]

SLICE_TOKENS: Final = 65_536
"""Tokens that are taken in at a time: a millisecond or two."""
SLICE_BLOCKS: Final = 16_384
"""Blocks that are published, or swapped, at a time: a millisecond or two."""
ALL_BLOCKS: Final = 1 << 60
SLICE_ENTRIES: Final = 65_536
"""Entries of whole tables that are written to a plan at a time: half a millisecond. A turn of the
event loop between two slices takes a tenth of that.
"""
MANY_TOKENS: Final = 4 * SLICE_TOKENS
"""More than this of them makes a request take some milliseconds."""
SWAPS: Final = ("swap_out", "swap_in")
_HASHED_BYTES: Final = 1 << 21  # a millisecond
_ID_BYTES: Final = 8
_TOKEN_BYTES: Final = 4


def finished(slices: Slices[T]) -> T:
    """What the work comes to, with no pause."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def paced(slices: Slices[T], *, in_slices: bool) -> Slices[T]:
    """The work, with its pauses only if ``in_slices``."""
    return (yield from slices) if in_slices else finished(slices)


def digest_in_slices(payload: bytes) -> Slices[bytes]:
    """``signing.digest`` of what took some time to encode, if it is large."""
    digest, view = hashlib.sha256(), memoryview(payload)
    for begin in range(0, len(payload), _HASHED_BYTES):
        if len(payload) > _HASHED_BYTES:
            yield
        digest.update(view[begin : begin + _HASHED_BYTES])
    return digest.digest()


def num_tokens_of(operation: cpb.Operation) -> int:
    """Tokens that an operation brings."""
    num_bytes = len(operation.append.token_ids) + len(operation.admit.token_ids)
    return num_bytes // _TOKEN_BYTES


def swaps(operation: cpb.Operation) -> bool:
    """Whether it moves sequences between tiers."""
    return operation.WhichOneof("operation") in SWAPS


def parts_of(message: cpb.Append) -> Iterator[tuple[int, cpb.Append]]:
    """The append in parts of about ``SLICE_TOKENS``, each with the index of its first item. An
    append of which the columns do not fit together stays whole, to be refused as such.
    """
    num = len(message.sequence_ids) // _ID_BYTES
    token_ids = message.token_ids  # each look at a message's bytes copies all of them
    try:
        num_tokens = columns.read(INT32, message.num_tokens, "num_tokens", length=num)
    except InvalidRequestError:
        num_tokens = None
    if (
        num_tokens is None
        or min(num_tokens, default=0) < 0
        or len(token_ids) != 4 * sum(num_tokens)
        or not _fit(message, num)
    ):
        yield 0, message
        return
    sequence_ids, first_positions = message.sequence_ids, message.first_positions
    num_slots, lookahead = message.num_slots, message.num_lookahead_slots
    given_column = message.num_tokens
    first = first_token = token = 0
    for item, given in enumerate(num_tokens, 1):
        token += given
        if token - first_token < SLICE_TOKENS and item < num:
            continue
        ids, counts = slice(first * 8, item * 8), slice(first * 4, item * 4)
        yield (
            first,
            cpb.Append(
                sequence_ids=sequence_ids[ids],
                first_positions=first_positions[ids],
                num_slots=num_slots[counts],
                num_tokens=given_column[counts],
                token_ids=token_ids[first_token * 4 : token * 4],
                num_lookahead_slots=lookahead[counts],
            ),
        )
        first, first_token = item, token


def _fit(message: cpb.Append, num: int) -> bool:
    """Whether the columns, but those of tokens, are those of ``num`` items."""
    return (
        num > 0
        and len(message.sequence_ids) == len(message.first_positions) == 8 * num
        and len(message.num_slots) == 4 * num
        and len(message.num_lookahead_slots) in (0, 4 * num)
    )
