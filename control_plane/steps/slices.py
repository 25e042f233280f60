"""How much work a slice of a request does, and the division of appends into slices.

A request yields after about a millisecond's work, so that others' requests run. The constants say
how much of each kind that is, by measurement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.slices import Slices
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.v1 import session_pb2 as cpb

SLICE_TOKENS: Final = 65_536
"""Tokens that a slice appends: a millisecond or two."""
SLICE_BLOCKS: Final = 16_384
"""Blocks that a slice publishes or swaps: a millisecond or two."""
SLICE_ENTRIES: Final = 65_536
"""Entries of whole tables that a slice writes to a plan: half a millisecond. A turn of the event
loop between two slices takes a tenth of that.
"""
SLICE_SEQUENCES: Final = 4096
"""Sequences that a slice describes: a millisecond."""
SLICE_BYTES: Final = 1 << 21
"""Bytes of a plan that a slice hashes: a millisecond."""
SLICE_RECEIPTS: Final = 256
"""Receipts that a slice verifies: two milliseconds."""
_ID_BYTES: Final = 8
_TOKEN_BYTES: Final = 4


def digest_of(payload: bytes) -> Slices[bytes]:
    """Return ``signing.digest`` of the payload, hashed ``SLICE_BYTES`` at a time."""
    digest, view = hashlib.sha256(), memoryview(payload)
    for begin in range(0, len(payload), SLICE_BYTES):
        yield
        digest.update(view[begin : begin + SLICE_BYTES])
    return digest.digest()


def parts_of(message: cpb.Append, token_ids: bytes) -> Iterator[tuple[int, cpb.Append]]:
    """Divide an append into parts of about ``SLICE_TOKENS``; yields each with the index of its
    first item. An append whose columns do not fit together stays whole, to be refused as such.
    ``token_ids``: those of the message.
    """
    if len(token_ids) <= _TOKEN_BYTES * SLICE_TOKENS:
        yield 0, message
        return
    num = len(message.sequence_ids) // _ID_BYTES
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
    given_column, checkpoints = message.num_tokens, message.checkpoint_positions
    for items, tokens in ranges_of(num_tokens):
        ids, counts = slice(items.start * 8, items.stop * 8), slice(items.start * 4, items.stop * 4)
        yield (
            items.start,
            cpb.Append(
                sequence_ids=sequence_ids[ids],
                first_positions=first_positions[counts],
                num_slots=num_slots[counts],
                num_tokens=given_column[counts],
                token_ids=token_ids[tokens.start * 4 : tokens.stop * 4],
                num_lookahead_slots=lookahead[counts],
                checkpoint_positions=checkpoints[counts],
            ),
        )


def ranges_of(num_tokens: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Divide items into parts of about ``SLICE_TOKENS``: the items of each, and their tokens.
    ``num_tokens``: of each item, none negative.
    """
    first = first_token = token = 0
    for item, given in enumerate(num_tokens, 1):
        token += given
        if token - first_token < SLICE_TOKENS and item < len(num_tokens):
            continue
        yield range(first, item), range(first_token, token)
        first, first_token = item, token


def _fit(message: cpb.Append, num: int) -> bool:
    """Return whether all columns have ``num`` items, except those of tokens."""
    return (
        num > 0
        and len(message.sequence_ids) == 8 * num
        and len(message.first_positions) == len(message.num_slots) == 4 * num
        and {len(message.num_lookahead_slots), len(message.checkpoint_positions)} <= {0, 4 * num}
    )
