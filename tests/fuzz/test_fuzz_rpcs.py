"""What both planes make of requests that were changed at random: a status of their own, always."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fuzz.run import SERVICES, run
from tests.helpers.programs import printed

# Enough for each method to be called and each status to come; at night there are 300 times as many.
NUM_INPUTS = 2_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.early
@pytest.mark.timeout(900)
async def test_no_changed_request_breaks_a_plane(tmp_path: Path) -> None:
    result = await run(tmp_path, num_inputs=NUM_INPUTS, seed=1)
    assert result.found == []
    assert result.num_inputs >= NUM_INPUTS
    assert {*result.calls} == {m.name for each in SERVICES.values() for m in each.methods}
    assert {"OK", "INVALID_ARGUMENT", "DATA_LOSS", "NOT_FOUND"} <= {*result.answers}
    assert "UNIMPLEMENTED" not in result.answers, "every call reaches its method"


@pytest.mark.nightly  # two more planes are started to send 400 inputs
@pytest.mark.timeout(300)
def test_the_command_prints_what_came_of_it() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "400", "--seed", "3"]
    assert " 0 finds" in printed(*command, env={"PYTHONPATH": None})


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_no_request_of_many_breaks_a_plane(tmp_path: Path) -> None:
    result = await run(tmp_path, num_inputs=600_000, seed=2)
    assert result.found == []
