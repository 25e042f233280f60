"""Bounds on what callers send, at both of their ends."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane import checks
from kvplane import ops
from kvplane.errors import InvalidRequestError


def refused(check: Callable[[], object]) -> str | None:
    """The field of the refusal, None without one."""
    try:
        check()
    except InvalidRequestError as error:
        return error.field
    return None


@pytest.mark.parametrize(("value", "ok"), [(-1, False), (0, True), (2**40, True), (2**40 + 1, 0)])
def test_counts_are_not_negative_and_not_absurd(value: int, ok: bool) -> None:
    assert refused(lambda: checks.count(value, field="num")) == (None if ok else "num")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_a_negative_token_is_found(tokens: list[int]) -> None:
    packed = ops.pack_tokens(tokens)
    want = "t" if min(tokens, default=0) < 0 else None
    assert refused(lambda: checks.token_ids(packed, field="t")) == want
    assert refused(lambda: checks.token_bytes(packed, field="t")) is None


def test_token_ids_are_whole_and_as_many_as_are_needed() -> None:
    token = struct.pack("<i", 7)
    assert refused(lambda: checks.token_ids(token, at_least=1, field="t")) is None
    assert refused(lambda: checks.token_ids(b"", at_least=1, field="t")) == "t"
    assert refused(lambda: checks.token_ids(token[:3], field="t")) == "t"
