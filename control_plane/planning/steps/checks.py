"""Checks of what callers send. Each raises InvalidRequestError naming the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplane.errors import InvalidRequestError

MAX_ID: Final = 2**63 - 1
# More tokens than any pool has slots; keeps sums of counts far from overflow on the wire.
MAX_COUNT: Final = 2**40
# Generations continue from those that data planes report: there must be room above them.
MAX_REPORTED: Final = 2**62


def identifier(value: int, *, field: str) -> None:
    """Ids are above 0 and fit an int64."""
    if not 0 < value <= MAX_ID:
        raise InvalidRequestError("must be from 1 to 2^63 - 1", field=field)


def count(value: int, *, field: str) -> None:
    """Counts are from 0 to ``MAX_COUNT``."""
    if not 0 <= value <= MAX_COUNT:
        raise InvalidRequestError("must be from 0 to 2^40", field=field)


def token_ids(value: bytes, *, at_least: int = 0, field: str) -> None:
    """Token ids are whole little-endian int32 values, none of them negative."""
    if len(value) % 4:
        raise InvalidRequestError("must be a multiple of 4 bytes", field=field)
    if len(value) < 4 * at_least:
        raise InvalidRequestError(f"must hold at least {at_least} token", field=field)
    if first_negative(value) is not None:
        raise InvalidRequestError("must not hold negative values", field=field)


def token_columns(num_tokens: Sequence[int], token_ids: bytes, *, at_least: int, at: str) -> None:
    """``num_tokens``, each ``at_least`` or more, add up to the int32 values of ``token_ids``. Their
    signs are not checked. ``at`` prefixes the columns' names in fields.
    """
    if num_tokens and min(num_tokens) < at_least:
        i = next(i for i, num in enumerate(num_tokens) if num < at_least)
        raise InvalidRequestError(f"must be at least {at_least}", field=f"{at}num_tokens[{i}]")
    if sum(num_tokens) * 4 != len(token_ids):
        raise InvalidRequestError(
            f"must hold {sum(num_tokens)} tokens of 4 bytes, the sum of num_tokens, but holds "
            f"{len(token_ids)} bytes",
            field=f"{at}token_ids",
        )


def first_negative(token_ids: bytes) -> int | None:
    """Index of the first token that is below 0, None when there is none."""
    # The sign bit is the top bit of every fourth byte.
    signs = token_ids[3::4]
    return None if signs.isascii() else next(i for i, sign in enumerate(signs) if sign > 127)


def div_ceil(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)
