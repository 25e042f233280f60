"""A caller goes on when a plane is killed and comes back, and ``examples/load.py`` runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import pytest
from engine_planes import POOL, ROOT, Pair, Process

from kvplane import ControlClient
from kvplane.errors import KvplaneError, PoolNotReadyError
from kvplane.session import Session
from tests.helpers.load import Load

PATIENCE_S = 60.0


async def next_session(client: ControlClient, former: int) -> int:
    """The session that has made a few steps, once it is another than ``former``."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
        try:
            sessions = await client.list_sessions(POOL, timeout_s=1.0)
        except KvplaneError:
            continue
        for session in sessions:
            if session.session_id != former and session.last_number > 3:
                return session.session_id
    raise AssertionError(f"no session followed {former}")


def restart(plane: Process) -> None:
    plane.kill()
    plane.start()


async def test_it_goes_on_when_each_plane_is_killed_and_comes_back(
    model: Path, tmp_path: Path
) -> None:
    load = Load(duration_s=300.0, num_sequences=4, pause_s=0.02)
    with Pair(model, tmp_path) as pair:
        async with ControlClient(pair.control.address) as client:
            running = asyncio.create_task(load.run(client, POOL))
            session = await next_session(client, 0)
            for plane in (pair.data, pair.control):
                await asyncio.to_thread(restart, plane)
                session = await next_session(client, session)
            assert load.num_lost_sessions == 2
            assert not running.done()
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.nightly  # a pair of planes and their model: clients that reopen have tests of theirs
async def test_it_fails_when_a_plane_does_not_come_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(duration_s=300.0, num_sequences=4)
    with Pair(model, tmp_path) as pair:
        async with ControlClient(pair.control.address) as client:
            monkeypatch.setattr(Session, "reopen", partialmethod(Session.reopen, timeout_s=2.0))
            running = asyncio.create_task(load.run(client, POOL))
            await next_session(client, 0)
            pair.data.kill()
            with pytest.raises(PoolNotReadyError):
                await asyncio.wait_for(running, PATIENCE_S)
    assert load.num_lost_sessions == 1
    assert load.num_steps > 0


@pytest.mark.nightly  # a pair of planes of its own
def test_the_program_prints_what_came_of_it(model: Path, tmp_path: Path) -> None:
    pool = ("--pool-id", "default")
    with Pair(model, tmp_path, arguments=pool) as pair:
        done = subprocess.run(
            [sys.executable, "-m", "examples.load", pair.control.address, "--model", model,
             "--duration-s", "1"],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[1-9]\d* requests, \d+ of \d+ .* cached, 0 sessions lost\n", done.stdout)
