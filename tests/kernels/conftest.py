"""Tests of the kernels run on one backend at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backends import ALL, CPUS, DeviceBackend, chosen_backend, in_place_of_the_cpu, used

from data_plane.kernels.backend import Kernels
from tests.helpers.data import data_rig

sound_rigs = pytest.fixture(autouse=True)(data_rig.sound_rigs)


@pytest.fixture(params=ALL)
def backend(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Each instruction set of this machine and the device, with threads in the order of seed 0."""
    with used(request.param) as kernels:
        yield kernels


@pytest.fixture(params=CPUS)
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set, by name."""
    with used(request.param):
        yield request.param


@pytest.fixture
def device() -> Iterator[DeviceBackend]:
    """The CUDA kernels, emulated or on a GPU."""
    with in_place_of_the_cpu(chosen_backend()) as kernels:
        yield kernels
