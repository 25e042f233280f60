"""Shell programs of the documents run as they stand, each in a network of its own, with default
ports free.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.documents import ROOT, blocks
from tests.helpers.tools import needs

ALONE: Final = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]


def run(program: str, folder: Path) -> str:
    """What a program of a document prints, with what it started in the background. That ends with
    it.
    """
    needs("curl", "ip")
    (folder / "models").symlink_to(ROOT / "models")
    script = f"ip link set lo up\n{program}"
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*ALONE, "bash", "-euc", script],
        cwd=folder, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("page", "heading", "answer"),
    [
        ("operations.md", "Shards: one model on several data planes", "xyz"),
        ("operations.md", "A control plane that can die", "xyz"),
    ],
)
def test_the_programs_of_a_section_answer(
    page: str, heading: str, answer: str, tmp_path: Path
) -> None:
    (program,) = blocks(page, "sh", heading)
    assert answer in run(program, tmp_path)


def test_the_router_of_its_readme_answers(tmp_path: Path) -> None:
    (program,) = blocks("../integrations/router/README.md", "sh", "A router")[:1]
    assert '"text":"xyz;' in run(program, tmp_path)
