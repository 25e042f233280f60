"""Killed processes change nothing, a short run of chaos ends clean, and one in which something is
wrong says so.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from random import Random

import pytest

from kvplane import ControlClient, ops
from tests.chaos import fleet as fleets
from tests.chaos.fleet import Fleet
from tests.chaos.run import phase
from tests.e2e.engine_planes import save_byte_model
from tests.helpers.programs import printed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.mark.nightly  # starts an engine twice; each death alone is tested on push
@pytest.mark.timeout(300)
async def test_processes_that_are_killed_change_no_answer_and_leave_nothing_held(
    model: Path, tmp_path: Path
) -> None:
    fleet = Fleet(model, tmp_path, engines=("one",))
    try:
        await fleet.start()
        (engine,) = fleet.engines
        for name, num_starts in (("kill_data", 1), ("kill_control", 1), ("kill_engine", 2)):
            await phase(fleet, Random(name), [name])
            assert (engine.num_starts, engine.wrong) == (num_starts, [])
    finally:
        await fleet.stop()
    assert "session reopened" in (tmp_path / "engine-0.log").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_minute_of_chaos_ends_clean(tmp_path: Path) -> None:
    """The command is run, which must find its modules without pytest."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.chaos", "--seconds", "60", "--seed", "1"]
    command += ["--logs", str(tmp_path / "logs"), "--json", str(out)]
    printed(*command, env={"PYTHONPATH": None})
    result = json.loads(out.read_text())
    assert result["num_phases"] > 0
    assert result["num_answers"] > 3 * result["num_phases"]
    assert result["wrong"] == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_a_data_plane_that_computes_wrongly_is_noticed(model: Path, tmp_path: Path) -> None:
    faulty = Fleet(model, tmp_path, ("tests.helpers.data.faulty_data_plane", "skip-newest-slot"))
    try:
        await faulty.start()
        assert any(engine.wrong for engine in faulty.engines)
    finally:
        await faulty.stop()


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_blocks_that_stay_in_use_are_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "PATIENCE_S", 5.0)
    fleet = Fleet(model, tmp_path)
    try:
        await fleet.start()
        async with ControlClient(fleet.links["control"].address) as control:
            layout = (await control.get_pool("one")).layout
            async with await control.open_session("one", layout) as session:
                await session.step([ops.admit(1, [7] * 40)])
                with pytest.raises(AssertionError, match="blocks stay in use"):
                    await fleet.check_nothing_is_held()
        await asyncio.wait_for(fleet.check_nothing_is_held(), 5.0)
    finally:
        await fleet.stop()
