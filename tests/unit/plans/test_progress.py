"""How much of a plan was written, against a model that marks every token of every layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.progress import Progress
from kvplane.errors import InvalidRequestError
from tests.helpers.refusals import refused

NUM_LAYERS = 2
SPANS = [3, 1, 4]

LAYERS = st.sampled_from([range(1), range(1, 2), range(2)])
STEP = st.one_of(
    st.integers(0, NUM_LAYERS - 1),
    st.tuples(LAYERS, st.integers(0, len(SPANS) - 1), st.integers(0, 3), st.integers(1, 4)),
)


@given(st.lists(STEP, max_size=25))
def test_it_is_complete_when_every_token_of_every_layer_was_written(
    steps: list[int | tuple[range, int, int, int]],
) -> None:
    """A step writes a whole layer, or some tokens of a span in some layers."""
    progress = Progress(NUM_LAYERS, np.array(SPANS))
    tokens = {(span, token) for span, num in enumerate(SPANS) for token in range(num)}
    written = [set[tuple[int, int]]() for _ in range(NUM_LAYERS)]
    for step in steps:
        if isinstance(step, int):
            progress.finish_layer(step)
            written[step] = set(tokens)
        else:
            layers, span, begin, num = step
            begin, end = min(begin, SPANS[span] - 1), min(begin + num, SPANS[span])
            before = {(span, token) for token in range(begin)}
            if all(before <= written[layer] for layer in layers):
                progress.check_no_gap(layers, span, begin)
                progress.extend(layers, span, end)
                for layer in layers:
                    written[layer] |= {(span, token) for token in range(begin, end)}
            else:
                with refused(InvalidRequestError, "entries"):
                    progress.check_no_gap(layers, span, begin)
        assert [progress.is_written(i) for i in range(NUM_LAYERS)] == [w == tokens for w in written]
        assert progress.is_complete == all(w == tokens for w in written)


def test_a_plan_without_spans_is_complete_from_the_start() -> None:
    assert Progress(NUM_LAYERS, np.zeros(0, np.int64)).is_complete


def test_a_gap_is_refused_saying_how_much_came_before_it() -> None:
    progress = Progress(NUM_LAYERS, np.array([20]))
    progress.extend(range(2), 0, 5)
    progress.extend(range(1), 0, 3)
    progress.check_no_gap(range(2), 0, 5)
    with pytest.raises(InvalidRequestError, match=r"5 tokens .* begin with its token 8"):
        progress.check_no_gap(range(2), 0, 8)
