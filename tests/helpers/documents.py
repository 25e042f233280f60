"""The code that the documents show, by page, language and heading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
INDENTED: Final = re.compile(r"^    (\S.*\n(?:    .*\n)*)", re.MULTILINE)
"""A block of commands, whose lines begin with four spaces."""
_FENCED: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def section(page: str, heading: str) -> str:
    """The text of a page of docs/ under one heading, up to the next of its level or above."""
    text = (ROOT / "docs" / page).read_text()
    begin = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert begin, f"{page} has no heading {heading!r}"
    rest = text[begin.end() :]
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def blocks(page: str, language: str, heading: str) -> list[str]:
    """The fenced blocks of a language under a heading, in order."""
    return [code for name, code in _FENCED.findall(section(page, heading)) if name == language]
