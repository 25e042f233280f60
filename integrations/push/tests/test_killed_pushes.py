"""A data plane is killed while blocks go from one to another: nothing half-written is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_pushes import receiver_is_killed, sender_is_killed


async def test_the_receiver_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await receiver_is_killed(tmp_path, monkeypatch)


async def test_the_sender_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await sender_is_killed(tmp_path, monkeypatch)
