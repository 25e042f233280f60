"""Checks of what callers send. Each raises InvalidRequestError naming the field."""

from __future__ import annotations

from typing import Final

from kvplane.errors import InvalidRequestError

# More tokens than any pool has slots; keeps sums of counts far from overflow on the wire.
MAX_COUNT: Final = 2**40
# Generations continue from those that data planes report: there must be room above them.
MAX_REPORTED: Final = 2**62


def count(value: int, *, field: str) -> None:
    """Counts are from 0 to ``MAX_COUNT``."""
    if not 0 <= value <= MAX_COUNT:
        raise InvalidRequestError("must be from 0 to 2^40", field=field)


def token_bytes(value: bytes, *, at_least: int = 0, field: str) -> None:
    """Token ids are whole int32 values. Their signs are not checked."""
    if len(value) % 4:
        raise InvalidRequestError("must be a multiple of 4 bytes", field=field)
    if len(value) < 4 * at_least:
        raise InvalidRequestError(f"must hold at least {at_least} token", field=field)


def token_ids(value: bytes, *, at_least: int = 0, field: str) -> None:
    """Token ids are whole little-endian int32 values, none of them negative."""
    token_bytes(value, at_least=at_least, field=field)
    # The sign bit is the top bit of every fourth byte.
    if not value[3::4].isascii():
        raise InvalidRequestError("must not hold negative values", field=field)
