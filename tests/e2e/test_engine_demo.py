"""The demonstration that ``make run`` shows: it passes, and leaves no plane behind. What its
comparison finds is tested in ``tests/unit/engine/test_engine_reference.py``.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import Program, called, run
from tests.helpers.waiting import wait_until

TIMEOUT_S = 280
FLAGS = ("--quick", "--run-folder")


def children_of_run(run_folder: Path) -> list[str]:
    """Planes that were started with logs in ``run_folder`` and still live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                target = str((entry / "fd" / "1").readlink())
            except OSError:
                continue
            if target.startswith(str(run_folder)) and target.endswith("_plane.log"):
                found.append(entry.name)
    return found


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_it_passes_and_prints_what_it_counted(tmp_path: Path) -> None:
    done = run("examples.demo", *FLAGS, str(tmp_path), timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    right = re.search(r"^correct answers: (\d+)/(\d+)$", done.stdout, re.MULTILINE)
    same = re.search(r"^identical to transformers: (\d+)/(\d+)", done.stdout, re.MULTILINE)
    assert right is not None and same is not None
    assert int(right[1]) >= 0.95 * int(right[2]) > 0
    assert int(same[1]) == int(same[2]) > 0
    for row in (
        "requests", "generated tokens/s", "prefix hit tokens", "copies on write",
        "blocks swapped out", "blocks swapped in", "evictions", "preemptions", "peak blocks",
        "step latency p50/p99",
    ):  # fmt: skip
        assert row in done.stdout
    assert children_of_run(tmp_path) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_however_it_ends_no_plane_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = Program("examples.demo", *FLAGS, str(tmp_path), out=tmp_path / "printed")
    try:
        wait_until(lambda: len(children_of_run(tmp_path)) == 2)
        process.send_signal(number)
        assert process.wait(30) != 0
    finally:
        process.kill()
    wait_until(lambda: not children_of_run(tmp_path), 15)


@pytest.mark.nightly  # a whole demonstration
def test_without_the_native_kernels_it_fails(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "kvplane_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('there are no kernels here')\n")
    command = [sys.executable, "-m", "examples.demo", *FLAGS, str(tmp_path / "run")]
    done = called(*command, env={"PYTHONPATH": str(package.parent)}, timeout_s=TIMEOUT_S)
    assert done.returncode != 0
    assert "data_plane did not start" in done.stderr
    assert "kernels" in (tmp_path / "run" / "data_plane.log").read_text()
    assert children_of_run(tmp_path / "run") == []
