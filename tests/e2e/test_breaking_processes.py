"""A data plane that sleeps while another takes its place. Processes that die and come back are in
``tests/chaos``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engine_planes import POOL, Process, data_plane

from kvplane.sync import ControlClient
from tests.helpers.waiting import wait_until


@pytest.mark.nightly  # sleeps; shards that are taken over have tests of theirs on push
def test_a_data_plane_that_was_taken_over_while_it_slept_ends_and_says_why(
    model: Path, tmp_path: Path
) -> None:
    """Started again, as by a supervisor, it has a newer epoch and takes the shard back."""
    control = Process("control_plane", tmp_path / "control.log", "--heartbeat-s", "0.5").start()
    first, second = (
        data_plane(control.address, model, tmp_path / f"{name}.log", "--num-device-blocks", "8")
        for name in ("first", "second")
    )

    def holder() -> str:
        with ControlClient(control.address) as client:
            (shard,) = client.get_pool(POOL).shards
            return shard.address if shard.connected else ""

    try:
        first.start()
        wait_until(lambda: holder() == first.address)
        os.kill(first.pid, signal.SIGSTOP)
        second.start()
        wait_until(lambda: holder() == second.address)
        second.stop()
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 1
        told = (tmp_path / "first.log").read_text()
        assert told.count("taken over reason=STALE_EPOCH") == 1
        last = told.splitlines()[-1]
        assert last.startswith(f"data_plane: error: shard 0 of pool '{POOL}' is registered by a")
        assert "This process ends" in last
        first.start()
        wait_until(lambda: holder() == first.address)
    finally:
        for process in (first, second, control):
            process.kill()
