"""The model of the engine's tests, and its answers by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_harness import ENGINES, LLAMA, Reference, save_model


@pytest.fixture(autouse=True)
def _engines_are_quiet() -> Iterator[None]:
    """No test leaves an engine whose blocks do not add up, or that holds some for nothing."""
    yield
    while ENGINES:
        ENGINES.pop().check()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, which tests only read."""
    return save_model(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    """Greedy answers by transformers."""
    return Reference(folder)
