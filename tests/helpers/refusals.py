"""A check that a call is refused, and which field its error names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvplane.errors import KvplaneError


@contextmanager
def refused(
    error: type[KvplaneError] | tuple[type[KvplaneError], ...], field: str, match: str | None = None
) -> Iterator[None]:
    """Assert that the body raises ``error`` naming ``field``. ``match``: for ``pytest.raises``."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert caught.value.field == field
