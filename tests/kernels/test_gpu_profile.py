"""What Nsight Compute writes becomes a line for each kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_gpu_benchmark import emulated

from benchmarks.gpu import profile
from benchmarks.gpu.cases.shapes import Shape

_CSV = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed"
"","","usecond","%"
"0","void kvplane::cuda::attend_short<Half, 128, 1, 3>(Work)","61.5","83.2"
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


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["run", "everything"]) == 2
    assert "NAME" in capsys.readouterr().out
    assert profile.main(["metrics"]) == 0
    assert "dram__throughput" in capsys.readouterr().out
