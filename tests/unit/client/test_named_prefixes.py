"""Token ids that stand for names."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from kvplane.prefixes import MAX_NAME_BYTES, tokens_of

NAMES = st.binary(max_size=MAX_NAME_BYTES + 8)


@given(NAMES, NAMES)
def test_different_names_have_different_ids(a: bytes, b: bytes) -> None:
    assert (tokens_of(a) == tokens_of(b)) == (a == b)


@given(NAMES, st.integers(0, 8))
def test_names_that_differ_in_zeros_alone_are_different(name: bytes, num: int) -> None:
    for other in (bytes(num) + name, name + bytes(num)):
        assert (tokens_of(name) == tokens_of(other)) == (name == other)


@given(st.binary(min_size=MAX_NAME_BYTES + 1, max_size=100))
def test_a_hash_is_no_name_of_another(name: bytes) -> None:
    hashed = sha256(name).digest()
    assert tokens_of(name) != tokens_of(hashed)


@given(st.binary(max_size=100))
def test_ids_are_those_of_one_block(name: bytes) -> None:
    ids = tokens_of(name)
    assert len(ids) == 16
    assert all(0 <= token < 2**31 for token in ids)


def test_the_ids_of_a_name_never_change() -> None:
    """Files are found by them after years."""
    assert tokens_of(b"") == [0] * 16
    assert tokens_of(b"k") == [1 << 18, *[0] * 14, ord("k")]
