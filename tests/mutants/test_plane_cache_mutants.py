"""Each planted fault of the cache for generate is caught by the checks that say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from kvplane.transformers import close_planes
from tests.helpers.patched_faults import load
from tests.helpers.plane_cache_checks import Check, tiny_llama

FAULTS = load("mutants/plane_cache/faults.py")
CASES = [(fault, check) for fault, found in FAULTS.CAUGHT_BY.items() for check in found]


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = tiny_llama()
    yield model
    close_planes(model)


@pytest.mark.parametrize(
    ("fault", "check"), CASES, ids=[f"{fault.__name__}-{check.__name__}" for fault, check in CASES]
)
def test_a_check_catches(
    fault: FAULTS.Fault, check: Check, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(model, num_device_blocks=128)
    close_planes(model)
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017
        check(model, num_device_blocks=128)
