"""Checks of what callers send. Each raises InvalidRequestError naming the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplane.errors import InvalidRequestError

# More tokens than any pool has slots; keeps sums of counts far from overflow on the wire.
MAX_COUNT: Final = 2**40


def count(value: int, *, field: str) -> None:
    """Check that a count is from 0 to ``MAX_COUNT``."""
    if not 0 <= value <= MAX_COUNT:
        raise InvalidRequestError("must be from 0 to 2^40", field=field)


def token_bytes(value: bytes, *, at_least: int = 0, field: str) -> None:
    """Check that token ids are ``at_least`` whole int32 values or more, of any sign."""
    if len(value) % 4:
        raise InvalidRequestError("must be a multiple of 4 bytes", field=field)
    if len(value) < 4 * at_least:
        raise InvalidRequestError(f"must hold at least {at_least} token", field=field)


def token_ids(value: bytes, *, at_least: int = 0, field: str) -> None:
    """Check that token ids are ``at_least`` little-endian int32 values or more, none negative."""
    token_bytes(value, at_least=at_least, field=field)
    # The sign bit is the top bit of every fourth byte.
    if not value[3::4].isascii():
        raise InvalidRequestError("must not hold negative values", field=field)


def token_columns(num_tokens: Sequence[int], token_ids: bytes, *, at_least: int = 0) -> None:
    """Check that ``num_tokens`` are ``at_least`` as much and add up to the tokens in
    ``token_ids``.
    """
    for i, num in enumerate(num_tokens):
        if num < at_least:
            raise InvalidRequestError(f"must be at least {at_least}", field=f"num_tokens[{i}]")
    if sum(num_tokens) * 4 != len(token_ids):
        raise InvalidRequestError(
            f"must hold {sum(num_tokens)} tokens of 4 bytes, the sum of num_tokens, but holds "
            f"{len(token_ids)} bytes",
            field="token_ids",
        )


def short(value: str, most: int, field: str) -> None:
    """Raise InvalidRequestError unless ``value`` has at most ``most`` characters."""
    if len(value) > most:
        raise InvalidRequestError(f"must have at most {most} characters", field=field)
