"""How torch's threads wait."""

from __future__ import annotations

import pytest

from engine.threads import tune_torch, waiting


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    assert waiting() == "GOMP_SPINCOUNT=default"
    monkeypatch.setenv(name, "7")
    tune_torch()
    assert waiting() == f"{name}=7"
    monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    tune_torch()
    assert waiting() == "GOMP_SPINCOUNT=5000"
    monkeypatch.undo()
