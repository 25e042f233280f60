"""A control plane writes its traffic as a trace, which the replay of traces reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_wire import RawSession, RawShard, Stub

from benchmarks.replay.__main__ import replay
from benchmarks.replay.traces import read_trace
from conftest import StartServer
from control_plane.server.server import ControlPlaneServer
from control_plane.server.trace_writer import TraceWriter
from kvplane import ops

PROMPT = list(range(1, 21))  # two blocks of 8, and a half
LARGE = 1 << 30


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_trace_that_a_control_plane_wrote_can_be_replayed(
    tmp_path: Path,
    start_control_plane: StartServer,
    connect: Callable[[ControlPlaneServer], Stub],
) -> None:
    path = tmp_path / "trace.jsonl"
    server = await start_control_plane(trace_file=path)
    stub = connect(server)
    shard = RawShard(stub)
    await shard.register()
    await shard.report()
    first, other = [await RawSession.open(stub, shard, namespace=name) for name in ("", "other")]
    await first.admit(1, PROMPT)
    await first.step(ops.append(1, [7, 7, 7], 3, first_position=20))
    assert (await first.step(ops.admit(2, [1] * 1000))).results[0].failures
    await first.step(ops.free([1, 99]))  # 99 is not live
    await first.admit(1, [*PROMPT[:8], 0, 0, 0])
    await other.admit(1, PROMPT)
    await first.step(ops.free([1]))
    await server.stop()
    assert [(r["input_length"], r["output_length"], r["hash_ids"]) for r in rows(path)] == [
        (20, 3, [0, 1]),
        (11, 0, [0]),
        (20, 0, [2, 3]),
    ]
    figures = replay(read_trace(path, "mooncake"), "reuse-rate", 16)
    assert (figures["num_blocks"], figures["num_hit_blocks"]) == (5, 1)


async def test_sequences_of_a_session_that_ends_are_written_with_their_lengths(
    tmp_path: Path,
    start_control_plane: StartServer,
    connect: Callable[[ControlPlaneServer], Stub],
) -> None:
    path = tmp_path / "trace.jsonl"
    server = await start_control_plane(trace_file=path, lease_s=0.3)
    stub = connect(server)
    shard = RawShard(stub)
    await shard.register()
    await shard.report()
    session = await RawSession.open(stub, shard)
    await session.admit(1, PROMPT)
    await session.step(ops.append(1, [7], 1, first_position=20))
    async with asyncio.timeout(10):
        while server.core.describe_pool("pool").num_sessions:
            await asyncio.sleep(0.02)
    await server.stop()
    assert [(r["input_length"], r["output_length"]) for r in rows(path)] == [(20, 1)]


def key(prefix: int) -> bytes:
    return prefix.to_bytes(16, "little")


def test_a_file_that_is_full_or_there_already_is_kept_as_one_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("of an earlier run\n")
    writer = TraceWriter(path, max_bytes=200)
    assert (tmp_path / "trace.jsonl.1").read_text() == "of an earlier run\n"
    for i in range(20):
        writer.admitted(1, i, 16, key(i))
        writer.freed(1, i, 17)
    writer.close()
    ids = [row["hash_ids"] for file in (f"{path}.1", path) for row in rows(Path(file))]
    assert ids == [[i] for i in range(20 - len(ids), 20)] and 2 < len(ids) < 8
    assert path.stat().st_size < 300


def test_a_prefix_that_was_forgotten_gets_a_new_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, LARGE, max_prefixes=4)
    for i, prefix in enumerate([0, 1, 0, 2, 0, 1]):
        writer.admitted(1, i, 16, key(prefix))
        writer.freed(1, i, 16)
    writer.close()
    assert [row["hash_ids"][0] for row in rows(path)] == [0, 1, 0, 2, 0, 3]


def test_what_the_queue_cannot_hold_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, LARGE)
    writer.admitted(1, 1, 1 << 22, bytes(1 << 26))
    writer.freed(1, 1, 1 << 22)
    writer.admitted(1, 2, 16, key(1))
    writer.close()
    assert writer.num_dropped == 1
    assert [row["input_length"] for row in rows(path)] == [16]


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = TraceWriter(Path("/dev/full"), LARGE)
    for i in range(1000):
        writer.admitted(1, i, 16, key(i))
        writer.freed(1, i, 16)
    writer.close()
    assert "trace ends here path=/dev/full" in caplog.text
