"""README's two commands, where nothing is installed but make, git and certificates."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import SkipTest

import pytest

from tests.helpers.tools import needs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
AS_ROOT = "export HOME=/root; make run && make test"
# A user copies the line that make prints, and whoever is root there runs it.
AS_USER = """
chown -R new /home/new
run() { setpriv --reuid=new --regid=new --init-groups "$@"; }
! run make run >/tmp/first 2>&1
line=$(sed -n 's/^setup: .*on Debian: sudo //p' /tmp/first)
test "$(grep -vc '^make: ' /tmp/first)" -eq 1 -a -n "$line" || { cat /tmp/first; exit 1; }
(apt-get update && $line) >/tmp/apt 2>&1 || { cat /tmp/apt; exit 1; }
run make run
run make test
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    needs("debootstrap")
    if os.getuid():
        raise SkipTest("needs: to be root")
    kept = os.environ.get("BARE_DEBIAN")
    yield Path(kept) if kept else tmp_path_factory.mktemp("bare") / "debian"


@pytest.mark.parametrize("commands", [AS_ROOT, AS_USER], ids=["root", "user"])
def test_both_commands_pass_on_a_bare_machine(base: Path, commands: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = Path(__file__).with_name("bare_debian.sh")
    with log.open("wb") as file:
        command = [script, base, "sh", "-euc", commands]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(errors="replace").splitlines()
    assert done.returncode == 0, "\n".join(lines[-60:])
    assert " failed" not in lines[-1] and " passed" in lines[-1]
    took = [line for line in lines if re.match(r"make run: \d+ s, of which \d+ s waited", line)]
    assert len(took) == 1
