"""Each planted fault of models that keep latents is caught by the probe, and by a text that
``generate`` makes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvplane.errors import InvalidRequestError
from kvplane.transformers import attention, close_planes
from kvplane.transformers.models import adapters
from kvplane.transformers.models.probe import probe
from tests.helpers.patched_faults import load
from tests.helpers.plane_cache_checks import greedy_with_padding
from tests.models.tiny_models import tiny_model

FAULTS = load("mutants/latents/faults.py").FAULTS
Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    attention.register()
    model = tiny_model("deepseek_v3")
    fault(monkeypatch)
    adapters.adapt(model)
    with pytest.raises(InvalidRequestError, match="options do not express"):
        probe(model)
    with pytest.raises(AssertionError):
        greedy_with_padding(model, num_device_blocks=64, probe=False)
    close_planes(model)
