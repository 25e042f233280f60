"""A plan's columns as arrays: nothing wraps around, and the first bad element is named."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.plan_columns import ints, limits_of_tiers, read_groups, refuse, tier_keys
from kvplane.errors import InvalidRequestError, StaleGenerationError
from kvplane.wire import columns
from tests.helpers.data.plan_author import DEVICE, HOST
from tests.helpers.refusals import refused


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_sums_of_narrow_elements_do_not_wrap_around(values: list[int]) -> None:
    column = columns.pack(columns.INT32, values)
    read = ints(columns.INT32, column, "c", len(values))
    assert read.dtype == np.int64
    assert read.tolist() == values
    assert int((read + read).sum()) == 2 * sum(values)


def test_a_column_of_another_length_is_refused() -> None:
    for column, length in ((bytes(8), 1), (bytes(8), 3), (bytes(7), None)):
        with refused(InvalidRequestError, "plan.c"):
            ints(columns.INT32, column, "plan.c", length)


def test_every_byte_stands_for_a_tier_or_for_none() -> None:
    limits = limits_of_tiers({DEVICE: 8, HOST: 0})
    assert {tier: limit for tier, limit in enumerate(limits.tolist()) if limit >= 0} == {
        DEVICE: 8,
        HOST: 0,
    }
    assert len(limits) == 256


def test_layer_groups_are_those_of_the_pool_and_may_be_left_out() -> None:
    two = {DEVICE: 8, HOST: 0, 2 + DEVICE: 4, 2 + HOST: 1}
    assert read_groups(b"", 2, two, "groups").tolist() == [0, 0]
    assert read_groups(b"\1\0", 2, two, "groups").tolist() == [1, 0]
    for column, field in ((b"\0\2", "groups[1]"), (b"\0", "groups")):
        with refused(InvalidRequestError, field):
            read_groups(column, 2, two, "groups")


def test_no_tier_of_one_group_is_another_groups() -> None:
    tiers, groups = np.array([1, 2, 3, 4, 0, 1, 2]), np.array([0, 0, 0, 0, 1, 1, 1])
    assert tier_keys(tiers, groups).tolist() == [1, 2, 0, 0, 0, 3, 4]


def test_the_first_bad_element_is_named() -> None:
    refuse(np.zeros(3, np.bool_), StaleGenerationError, str, "f")
    with refused(StaleGenerationError, "f[1]", match="element 1"):
        refuse(np.array([False, True, True]), StaleGenerationError, lambda i: f"element {i}", "f")
