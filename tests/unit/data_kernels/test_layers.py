"""Which of the model's layers a shard holds."""

from __future__ import annotations

import pytest

from data_plane.execution.layers import layer_index, layer_range
from kvplane.errors import InvalidRequestError

HELD = (4, 5, 6)


def test_layers_are_counted_in_the_shard() -> None:
    assert layer_index(HELD, 5) == 1
    assert list(layer_range(HELD, 0, 0)) == [0, 1, 2]
    assert list(layer_range(HELD, 5, 2)) == [1, 2]


@pytest.mark.parametrize(
    ("first", "num", "field"),
    [(5, 0, "first_layer"), (3, 1, "first_layer"), (5, 3, "num_layers"), (5, -1, "num_layers")],
)
def test_a_range_that_the_shard_does_not_hold_is_refused(first: int, num: int, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        layer_range(HELD, first, num)
    assert refused.value.field == field


def test_a_layer_that_the_shard_does_not_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        layer_index(HELD, 7, "attend.")
    assert refused.value.field == "attend.layer"
