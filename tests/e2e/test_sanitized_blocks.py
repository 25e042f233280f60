"""The tests of kvplane_blocks pass on a build with AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_tests_of_the_blocks_pass_under_sanitizers() -> None:
    done = subprocess.run(
        ["tests/cpp/sanitize_blocks.sh"],
        cwd=ROOT,
        env=os.environ | {"KVPLANE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout
