"""What tests of processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.byte_model import save_byte_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model, which tests only read."""
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))
