"""Models that would give wrong positions to sequences that share a row, or to padded rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from kvplane.transformers import attention, close_planes
from kvplane.transformers.models import adapters
from kvplane.transformers.models.probe import probe
from tests.helpers.plane_cache_checks import rows_alone
from tests.models.tiny_models import tiny_model


@pytest.fixture(params=["bart", "roberta"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = tiny_model(request.param)
    adapters.adapt(model)
    attention.check_masks()  # as after a pass with pictures in the same process
    yield model
    close_planes(model)


def test_sequences_in_one_row_have_positions_of_their_own(model: PreTrainedModel) -> None:
    probe(model)


def test_padded_rows_have_the_positions_that_they_have_alone(model: PreTrainedModel) -> None:
    rows_alone(model, num_device_blocks=256)
