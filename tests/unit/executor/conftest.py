"""Fixtures of the executor's tests."""

from __future__ import annotations

import pytest

from tests.helpers.data import data_rig

sound_rigs = pytest.fixture(autouse=True)(data_rig.sound_rigs)


@pytest.fixture
def rig() -> data_rig.Rig:
    """An executor of small pools, with session 1 open."""
    return data_rig.Rig()
