"""The pages of docs/reference/ are what the declarations of metrics, errors and flags say."""

from __future__ import annotations

import re

import pytest

from scripts import reference

PAGES = sorted(reference.PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_that_of_the_declarations(page: str) -> None:
    assert (reference.FOLDER / page).read_text() == reference.PAGES[page](), "run make reference"


def test_each_error_is_on_the_page() -> None:
    reasons = re.findall(r"\| `([A-Z_]+)` \| [^|]+ \|$", reference.errors(), re.MULTILINE)
    assert sorted(reasons) == sorted(map(reference.reason_of, reference.CODES))
