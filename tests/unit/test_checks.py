"""Bounds on what callers send, at both of their ends."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.planning.steps import checks
from kvplane import ops
from kvplane.errors import InvalidRequestError


def refused(check: Callable[[], object]) -> str | None:
    """The field of the refusal, None without one."""
    try:
        check()
    except InvalidRequestError as error:
        return error.field
    return None


@pytest.mark.parametrize(
    ("value", "ok"), [(0, False), (1, True), (2**63 - 1, True), (2**63, False), (-1, False)]
)
def test_ids_are_above_zero_and_fit_an_int64(value: int, ok: bool) -> None:
    assert refused(lambda: checks.identifier(value, field="id")) == (None if ok else "id")


@pytest.mark.parametrize(("value", "ok"), [(-1, False), (0, True), (2**40, True), (2**40 + 1, 0)])
def test_counts_are_not_negative_and_not_absurd(value: int, ok: bool) -> None:
    assert refused(lambda: checks.count(value, field="num")) == (None if ok else "num")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_the_first_negative_token_is_found(tokens: list[int]) -> None:
    want = next((i for i, token in enumerate(tokens) if token < 0), None)
    packed = ops.pack_tokens(tokens)
    assert checks.first_negative(packed) == want
    assert refused(lambda: checks.token_ids(packed, field="t")) == (None if want is None else "t")


def test_token_ids_are_whole_and_as_many_as_are_needed() -> None:
    token = struct.pack("<i", 7)
    assert refused(lambda: checks.token_ids(token, at_least=1, field="t")) is None
    assert refused(lambda: checks.token_ids(b"", at_least=1, field="t")) == "t"
    assert refused(lambda: checks.token_ids(token[:3], field="t")) == "t"


@pytest.mark.parametrize(
    ("num_tokens", "num_given", "field"),
    [
        ([], 0, None),
        ([2, 1], 3, None),
        ([2, 0], 2, "at.num_tokens[1]"),
        ([2, -1], 1, "at.num_tokens[1]"),
        ([2, 1], 2, "at.token_ids"),
        ([2, 1], 4, "at.token_ids"),
    ],
)
def test_token_columns_are_counted_by_one_another(
    num_tokens: list[int], num_given: int, field: str | None
) -> None:
    token_ids = bytes(4 * num_given)
    got = refused(lambda: checks.token_columns(num_tokens, token_ids, at_least=1, at="at."))
    assert got == field


@given(st.integers(0, 2**45), st.integers(1, 2**20))
def test_div_ceil_rounds_up(value: int, divisor: int) -> None:
    quotient = checks.div_ceil(value, divisor)
    assert (quotient - 1) * divisor < value <= quotient * divisor
