"""Each planted fault of the cache for generate is caught by the checks that say so."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from plane_cache_checks import Check, tiny_llama
from transformers import PreTrainedModel

from kvplane.transformers import close_planes


def _load_faults() -> ModuleType:
    path = Path(__file__).parent / "plane_cache" / "faults.py"
    spec = importlib.util.spec_from_file_location("plane_cache_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = _load_faults()
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
