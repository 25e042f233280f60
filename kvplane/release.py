"""The release with the git commit that it was built from, such as 0.1.0+g11bfda2196e0.

``kvplane.__version__`` is the same for all builds of a release; this tells them apart.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

COMMIT_FILE = "commit.txt"  # beside this file in wheels and source distributions


@cache
def release() -> str:
    """Return the version of the release with its commit, or alone if that is not known."""
    from kvplane import __version__  # setup.py runs this file, and cannot import its package

    known = commit()
    return f"{__version__}{'.' if '+' in __version__ else '+'}g{known}" if known else __version__


def commit() -> str:
    """Return 12 digits of the commit, from the file that a build writes or from git in a checkout;
    empty if neither is there.
    """
    here = Path(__file__).resolve().parent
    if (here / COMMIT_FILE).exists():
        return (here / COMMIT_FILE).read_text().strip()
    if not (here.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(here.parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or the folder is somebody else's
        return ""
