"""The pages that the contract's comments point to say what the code does, and no page's commands do
harm if they are taken at their word.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from kvplane.layout import LayerGroup, Layout

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = (*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("integrations/*/*.md")))
STARTS_A_POOL = re.compile(r"kvplane data|--data-plane embedded")


def test_the_fingerprints_of_the_page_are_those_of_their_layouts() -> None:
    page = (DOCS / "internals.md").read_text()
    vectors = re.findall(r"```json\n(.*)\n```\n`([0-9a-f]{64})`", page)
    plain = Layout("tiny", 16, "bfloat16", "bfloat16", (LayerGroup("full", (0, 1), 2, 64),))
    scaled = LayerGroup("full", (0,), 2, 64, key_scales=(0.5,), value_scales=(2.0,))
    groups = (scaled, LayerGroup("window", (1,), 2, 64, 512))
    other = Layout("caf\u00e9/fp8", 32, "float32", "float8_e4m3fn", groups)
    for layout, (text, fingerprint) in zip((plain, other), vectors, strict=True):
        assert hashlib.sha256(text.encode()).hexdigest() == fingerprint
        assert layout.fingerprint.hex() == fingerprint
        assert json.loads(text)["model_id"] == layout.model_id


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
