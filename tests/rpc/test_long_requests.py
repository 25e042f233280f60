"""Requests that take long, over gRPC: others are served meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.slices import Slices
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import PATIENCE_S, RawSession, RawShard, Stub

# Slices for which the long request waits for the others, and no longer.
MOST_SLICES = 200_000


async def test_others_are_served_while_a_request_takes_long(
    stub: Stub,
    shard: RawShard,
    session: RawSession,
    control_server: ControlPlaneServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, core = await RawSession.open(stub, shard), control_server.core
    began, are_served, run = asyncio.Event(), asyncio.Event(), core.run

    def linger(request: Any, tenant: str) -> Slices[Any]:
        monkeypatch.setattr(core, "run", run)
        began.set()
        for _ in range(MOST_SLICES):
            if not are_served.is_set():
                yield
        return (yield from run(request, tenant))

    monkeypatch.setattr("control_plane.steps.requests.SLICE_TOKENS", 40)
    monkeypatch.setattr(core, "run", linger)
    admits = [ops.admit(i, [7] * 21) for i in range(1, 6)]
    answer = stub.Step(pb.StepRequest(**session.next(), operations=admits))
    await began.wait()
    for i in range(1, 4):
        await other.admit(i, [i] * 3)
    assert not answer.done()
    are_served.set()
    assert len((await asyncio.wait_for(answer, PATIENCE_S)).results) == 5
