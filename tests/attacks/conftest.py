"""Planes under attack: real processes, one of each kind for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvplane.wire import protocol
from tests.helpers.attacked_planes import HonestCaller, PlaneProcess


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneProcess]:
    """A control plane of default settings."""
    with PlaneProcess("control_plane", tmp_path_factory.mktemp("control")) as plane:
        yield plane


@pytest.fixture(scope="module")
def honest(control_plane: PlaneProcess) -> Iterator[HonestCaller]:
    """An engine of the control plane; it has registered a pool too."""
    with HonestCaller(control_plane.address) as caller:
        caller.period(0.2)  # to warm up
        yield caller


@pytest.fixture(scope="module")
def channel(control_plane: PlaneProcess) -> Iterator[grpc.Channel]:
    """The attacker's connection."""
    with grpc.insecure_channel(control_plane.address, options=protocol.CHANNEL_OPTIONS) as channel:
        yield channel
