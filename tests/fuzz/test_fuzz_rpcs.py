"""What both planes make of requests that were changed at random: a status of their own, always."""

from __future__ import annotations

from pathlib import Path

import pytest
from run import SERVICES, run

# What takes about a minute where nothing else runs.
NUM_INPUTS = 45_000


@pytest.mark.early
@pytest.mark.timeout(900)
async def test_no_changed_request_breaks_a_plane(tmp_path: Path) -> None:
    result = await run(tmp_path, num_inputs=NUM_INPUTS, seed=1)
    assert result.found == []
    assert result.num_inputs >= NUM_INPUTS
    assert {*result.calls} == {m.name for each in SERVICES.values() for m in each.methods}
    assert {"OK", "INVALID_ARGUMENT", "DATA_LOSS", "NOT_FOUND"} <= {*result.answers}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_no_request_of_many_breaks_a_plane(tmp_path: Path) -> None:
    result = await run(tmp_path, num_inputs=600_000, seed=2)
    assert result.found == []
