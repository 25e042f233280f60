"""Tests the help of the router's program."""

from __future__ import annotations

import pytest

from kvplane.integrations.router.program import run


def test_help_says_how_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"], {})
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Usage: python -m kvplane.integrations.router ")
    assert "KVPLANE_ROUTER_ENGINE" in printed
