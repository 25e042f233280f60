"""Text that callers send adds no lines to a log, and does not steer a terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from kvplane.serving.observability import logs

SENT = "a\nlevel=ERROR forged\r\x1b[2J\x07\x9b31m\u2028\u202eright\u2067left\u200f\u061c\ttab\x00"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_record_is_one_line_without_control_characters(
    format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("info", format)
    logging.getLogger("x").warning("session opened client=%s", SENT)
    try:
        raise ValueError(SENT)
    except ValueError:
        logging.getLogger("x").exception("failed client=%s", SENT)
    sys.stderr.flush()
    lines = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert len(lines) == 2
    for line in lines:
        assert line.isprintable(), repr(line)
        assert "forged" in line
    if format == "json":
        assert json.loads(lines[0])["message"].endswith(SENT)
