"""``kvplane bench`` goes on when a plane is killed and comes back, and counts what it lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from engine_planes import POOL, ROOT, Pair, Process, save_byte_model

from kvplane import ControlClient
from kvplane.cli.bench import Traffic, bench
from kvplane.errors import KvplaneError

TRAFFIC = Traffic(duration_s=150.0, max_steps=150, num_sequences=4, pause_s=0.02)
LOSSES = ["lost_sessions", "reopened_sessions", "lost_steps", "lost_sequences"]
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


async def test_bench_goes_on_when_each_plane_is_killed_and_comes_back(tmp_path: Path) -> None:
    with Pair(save_byte_model(tmp_path / "model"), tmp_path) as pair:
        async with ControlClient(pair.control.address) as client:
            await client.wait_ready(POOL, PATIENCE_S)
            load = asyncio.create_task(bench(client, POOL, TRAFFIC))
            session = await next_session(client, 0)
            for plane in (pair.data, pair.control):
                await asyncio.to_thread(restart, plane)
                session = await next_session(client, session)
            measured = await load
    summary = measured.summary()
    assert list(summary)[-len(LOSSES) :] == LOSSES
    assert summary["lost_sessions"] == summary["reopened_sessions"] == summary["lost_steps"] == 2
    assert 2 <= summary["lost_sequences"] <= 2 * TRAFFIC.num_sequences
    assert summary["steps"] >= TRAFFIC.max_steps - 2


async def test_bench_fails_after_its_time_when_a_plane_does_not_come_back(tmp_path: Path) -> None:
    with Pair(save_byte_model(tmp_path / "model"), tmp_path) as pair:
        async with ControlClient(pair.control.address) as client:
            await client.wait_ready(POOL, PATIENCE_S)
            words = ["--control-plane", pair.control.address, "--timeout-s", "2", "--json", "bench"]
            load = subprocess.Popen(
                [sys.executable, "-m", "kvplane", *words, "--duration-s", "3"],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            await next_session(client, 0)
        pair.data.kill()
        out, err = await asyncio.to_thread(load.communicate, timeout=PATIENCE_S)
    assert load.returncode == 1, err
    summary = json.loads(out)
    assert [summary[name] for name in LOSSES[:3]] == [1, 0, 1]
    assert summary["steps"] > 0
    assert "PLANE_UNAVAILABLE" in err
