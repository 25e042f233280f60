"""Planes for tests that run a model through them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engine_planes import Process


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one for all tests of a file."""
    with Process("control_plane", tmp_path_factory.mktemp("control") / "log") as process:
        yield process.address


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[str]:
    """The address of one for each test: it keeps pools that went away, up to a bound."""
    with Process("control_plane", tmp_path / "control.log") as process:
        yield process.address
