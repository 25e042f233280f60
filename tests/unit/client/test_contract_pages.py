"""The pages that the contract's comments point to say what the code does."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from kvplane.errors import CODES
from kvplane.layout import LayerGroup, Layout
from scripts import errors_page

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_errors_is_that_of_the_classes() -> None:
    assert errors_page.PAGE.read_text() == errors_page.page(), "run make errors-page"
    assert set(CODES.values()) <= set(errors_page.WHAT_TO_DO)


def test_the_fingerprints_of_the_page_are_those_of_their_layouts() -> None:
    page = (DOCS / "layout.md").read_text()
    vectors = re.findall(r"```json\n(.*)\n```\n`([0-9a-f]{64})`", page)
    plain = Layout("tiny", 16, "bfloat16", "bfloat16", (LayerGroup("full", (0, 1), 2, 64),))
    scaled = LayerGroup("full", (0,), 2, 64, key_scales=(0.5,), value_scales=(2.0,))
    groups = (scaled, LayerGroup("window", (1,), 2, 64, 512))
    other = Layout("caf\u00e9/fp8", 32, "float32", "float8_e4m3fn", groups)
    for layout, (text, fingerprint) in zip((plain, other), vectors, strict=True):
        assert hashlib.sha256(text.encode()).hexdigest() == fingerprint
        assert layout.fingerprint.hex() == fingerprint
        assert json.loads(text)["model_id"] == layout.model_id
