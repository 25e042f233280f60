"""The tests of kvplane_blocks pass on a build with AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import sys

import pytest

from tests.helpers.programs import printed


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_tests_of_the_blocks_pass_under_sanitizers() -> None:
    said = printed("tests/cpp/sanitize_blocks.sh", env={"KVPLANE_PYTHON": sys.executable})
    assert " passed" in said
