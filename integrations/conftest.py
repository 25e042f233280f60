"""Tests of integrations run at night, but those of fleets, which need Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("fleet") is None:
            item.add_marker(pytest.mark.nightly)
