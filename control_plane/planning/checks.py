"""Bounds on what callers send, each refused with the field named."""

from __future__ import annotations

from typing import Final

from kvplane.errors import InvalidRequestError

MAX_ID: Final = 2**63 - 1
# More tokens than any pool has slots; keeps sums of counts far from overflow on the wire.
MAX_COUNT: Final = 2**40
# Ids and generations that a data plane reports are counted on from: there must be room above them.
MAX_REPORTED: Final = 2**62


def identifier(value: int, *, field: str) -> None:
    """Ids are above 0 and fit an int64."""
    if not 0 < value <= MAX_ID:
        raise InvalidRequestError("must be from 1 to 2^63 - 1", field=field)


def count(value: int, *, field: str) -> None:
    """Counts are not negative, and not absurd."""
    if not 0 <= value <= MAX_COUNT:
        raise InvalidRequestError("must be from 0 to 2^40", field=field)


def token_ids(value: bytes, *, at_least: int = 0, field: str) -> None:
    """Token ids are whole little-endian int32 values, none of them negative."""
    if len(value) % 4:
        raise InvalidRequestError("must be a multiple of 4 bytes", field=field)
    if len(value) < 4 * at_least:
        raise InvalidRequestError(f"must hold at least {at_least} token", field=field)
    # The sign bit is the top bit of every fourth byte.
    if not value[3::4].isascii():
        raise InvalidRequestError("must not hold negative values", field=field)


def div_ceil(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)
