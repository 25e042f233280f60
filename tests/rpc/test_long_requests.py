"""Requests that take long, over gRPC: others' are served meanwhile, those of the session wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.core import ControlPlane
from control_plane.server.server import ControlPlaneServer
from kvplane import ops
from kvplane.slices import Slices
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.planning.control_wire import RawSession, RawShard, Stub

# Slices for which a request waits for what it waits for, and the most that it waits.
MOST_SLICES = 200_000
PATIENCE_S = 60.0


class Lingering:
    """The first request that takes long goes on, slice by slice, until ``is_enough``."""

    def __init__(self, patch: pytest.MonkeyPatch, core: ControlPlane) -> None:
        self.is_enough = False
        self.num_slices = 0
        self.began = asyncio.Event()
        self._is_first = True
        self._run = core.run
        patch.setattr("control_plane.steps.requests.SLICE_TOKENS", 40)
        patch.setattr(core, "run", self.run)

    def run(self, request: Any, tenant: str) -> Slices[Any]:
        is_first, self._is_first = self._is_first, False
        return self._lingering(request, tenant) if is_first else self._run(request, tenant)

    def _lingering(self, request: Any, tenant: str) -> Slices[Any]:
        self.began.set()
        while not self.is_enough and self.num_slices < MOST_SLICES:
            self.num_slices += 1
            yield
        assert self.is_enough, "nobody was served meanwhile"
        return (yield from self._run(request, tenant))


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch, control_server: ControlPlaneServer) -> Lingering:
    return Lingering(monkeypatch, control_server.core)


@pytest.fixture
async def other(stub: Stub, shard: RawShard) -> RawSession:
    return await RawSession.open(stub, shard)


def long(session: RawSession) -> pb.StepRequest:
    admits = [ops.admit(i, [7] * 21) for i in range(1, 6)]
    return pb.StepRequest(**session.next(), operations=admits)


async def test_others_are_served_while_a_request_takes_long(
    lingering: Lingering, session: RawSession, other: RawSession
) -> None:
    answer = asyncio.create_task(call(session.stub.Step(long(session))))
    await lingering.began.wait()
    for i in range(1, 4):
        await other.admit(i, [i] * 3)
    assert not answer.done()
    assert lingering.num_slices > 3, "they were served between slices"
    lingering.is_enough = True
    result = await asyncio.wait_for(answer, PATIENCE_S)
    assert len(result.results) == 5


async def call(pending: Any) -> Any:
    return await pending
