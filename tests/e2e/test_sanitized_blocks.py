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


# These take seconds, and several times as long under sanitizers. Of the walks those stay that have
# a quota, or several groups; the others are walked at night.
LONG = (
    "shortened or allocate_again or TestWatching or memory_grows"
    " or (walk and not (in_a_walk or 16+5w0 or 14+6w3-6 or 12+5w6-0))"
)


def run(*command: str) -> None:
    """The script with this command passes."""
    done = subprocess.run(
        ["scripts/sanitize_blocks.sh", *command],
        cwd=ROOT,
        env=os.environ | {"KVPLANE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout


@pytest.mark.early
@pytest.mark.timeout(900)
def test_the_shorter_tests_of_the_blocks_pass_under_sanitizers() -> None:
    options = ("-q", "-p", "no:cacheprovider", "-m", "not nightly", "-k", f"not ({LONG})")
    programs = "--ignore=tests/unit/blocks/test_native_programs.py"  # with sanitizers of their own
    run(sys.executable, "-m", "pytest", *options, programs, "tests/unit/blocks")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_tests_of_the_blocks_pass_under_sanitizers() -> None:
    run()
