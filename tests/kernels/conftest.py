"""Tests of arithmetic run on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import kvplane_kernels as native
import pytest


@pytest.fixture(params=native.cpu_isas())
def every_cpu_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.cpu_isa()
    native.use_cpu_isa(request.param)
    yield request.param
    native.use_cpu_isa(before)
