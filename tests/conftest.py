"""Every test begins from the same random state; the header of a run says which."""

from __future__ import annotations

import os
import random

import pytest

SEED = int(os.environ.get("KVPLANE_TEST_SEED", "0"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(SEED)


def pytest_report_header() -> str:
    return f"seed: {SEED} (KVPLANE_TEST_SEED)"
