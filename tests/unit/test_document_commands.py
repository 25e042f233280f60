"""Commands of the documents that would do harm if they were taken at their word."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("integrations/*/*.md")))
STARTS_A_POOL = re.compile(r"python -m data_plane|--data-plane embedded")


def test_data_planes_that_start_together_are_told_their_size() -> None:
    """Otherwise each takes half of the memory that is free."""
    found = [
        block
        for page in PAGES
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), re.DOTALL)
        if "\nfor " in block and STARTS_A_POOL.search(block)
    ]
    assert len(found) >= 3
    for block in found:
        assert "--num-device-blocks" in block, block
