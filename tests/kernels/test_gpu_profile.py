"""What Nsight Compute writes becomes a line for each kernel."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_build import ROOT
from launched import launched_kernels
from test_gpu_benchmark import emulated

from benchmarks.gpu import profile
from benchmarks.gpu.cases.shapes import Shape

_CSV = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed"
"","","usecond","%"
"0","void kvplane::cuda::attend_short<kvplane::cuda::Half, 128, 1, 3>(Work)","61.5","83.2"
"""
# As many query tokens and query heads of a KV head as the shapes that are profiled, and splits.
_SMALL = {
    "decode": Shape(2, 560, 8, 2, 32),
    "speculative": Shape(2, 564, 8, 2, 32, new=4),
    "prefill": Shape(1, 40, 8, 2, 32, new=40),
}
_PYTHON = """#!/bin/sh
case "$*" in *"gpu.profile kernel"*) exec "$REAL" "$@" ;; esac
"""
_NCU = """#!/bin/sh
echo "$*" >>"$CALLS"
"""


def test_a_kernel_gets_a_line_and_the_units_none(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(_CSV)
    assert profile.say(path) == [
        "profile: attend_short<Half, 128, 1, 3>: time 61.5, dram % 83.2",
    ]
    path.write_text("==ERROR== ERR_NVGPUCTRPERM\n")
    assert profile.say(path) == []


def test_the_program_to_profile_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(profile.SHAPES, "decode", Shape(2, 40, 4, 2, 32))
    machine = emulated()
    before = machine.native.num_launches()
    profile.run("decode", machine)
    assert machine.native.num_launches() > before


def ncu_calls(folder: Path) -> dict[str, list[str]]:
    """How benchmarks/gpu/run.sh calls ncu: the words, by the name of the profiled program."""
    (folder / "bin").mkdir()
    for name, text in (("python3", _PYTHON), ("ncu", _NCU)):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    calls = folder / "calls"
    env = os.environ | {"CALLS": str(calls), "OUT": str(folder), "BUILD": str(folder / "build")}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", "REAL": sys.executable}
    script = [str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--no-build", "--only", "profile"]
    subprocess.run(script, env=env | {"PYTHON": "python3"}, check=True, capture_output=True)
    words = [shlex.split(line) for line in calls.read_text().splitlines()]
    return {call[-1]: call for call in words}


def after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", profile.SHAPES)
def test_the_second_launch_of_the_kernel_that_attends_is_profiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call launches other kernels too, with names like its own, and some of them do nothing."""
    shape, small = profile.SHAPES[name], _SMALL[name]
    assert shape.heads // shape.kv_heads == small.heads // small.kv_heads
    monkeypatch.setitem(profile.SHAPES, name, small)
    machine = emulated()
    launched_kernels(machine.native)
    profile.run(name, machine)
    launched = [launch.kernel for launch in launched_kernels(machine.native)]
    asked = ncu_calls(tmp_path)[name]
    # As ncu does: of the launches of the kernel, without template arguments, some are skipped.
    wanted = after(asked, "-k")
    pattern = wanted.removeprefix("regex:") if wanted.startswith("regex:") else f"^{wanted}$"
    matching = [i for i, kernel in enumerate(launched) if re.search(pattern, kernel)]
    skipped = int(after(asked, "--launch-skip"))
    assert after(asked, "--launch-count") == "1"
    profiled = matching[skipped]
    # Sequences of up to 32 rows of a KV head are the short kernel's.
    is_short = small.new * small.heads // small.kv_heads <= 32
    kernel = "attend_short" if is_short else "attend_long"
    assert [i for i, name in enumerate(launched) if name == kernel][1] == profiled, launched


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["run", "everything"]) == 2
    assert "NAME" in capsys.readouterr().out
    assert profile.main(["metrics"]) == 0
    assert "dram__throughput" in capsys.readouterr().out
