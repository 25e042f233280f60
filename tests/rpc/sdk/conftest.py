"""Planes that answer as a test says, and clients of theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvplane import ControlClient, DataClient, Execution, Session
from tests.helpers.sdk_peers import (
    LAYOUT,
    ScriptedControlPlane,
    ScriptedDataPlane,
    payload,
    serving,
)


@pytest.fixture
async def plane() -> ScriptedControlPlane:
    return ScriptedControlPlane()


@pytest.fixture
async def client(plane: ScriptedControlPlane) -> AsyncIterator[ControlClient]:
    async with serving(plane) as address, ControlClient(address, timeout_s=10) as client:
        yield client


@pytest.fixture
async def session(client: ControlClient) -> AsyncIterator[Session]:
    async with await client.open_session("p", LAYOUT) as session:
        yield session


@pytest.fixture
async def data_plane() -> ScriptedDataPlane:
    return ScriptedDataPlane()


@pytest.fixture
async def execution(data_plane: ScriptedDataPlane) -> AsyncIterator[Execution]:
    async with (
        serving(data_plane) as address,
        DataClient(address) as client,
        await client.open(payload(b"grant")) as execution,
    ):
        yield execution
