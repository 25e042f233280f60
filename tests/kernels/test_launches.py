"""When a kernel may begin early, and how often the CUDA runtime is asked for shared memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from emulated_build import ROOT
from test_cuda_build import HAS_NVCC

LAUNCH = Path("cuda") / "device" / "launch.h"
# The text of launch.h that is replaced, what replaces it, and what the program says of it.
FAULTS = {
    "the_device_decides": (
        "attributes.ptxVersion >= kArchThatWaits",
        "attributes.binaryVersion >= kArchThatWaits",
        "PTX of sm_80",
    ),
    "a_kernel_is_asked_about_each_time": (
        "known[device] = waits ? 2 : 1;",
        ";",
        "asked about once",
    ),
    "shared_memory_is_allowed_each_time": (
        "allowed[device] >= shared_bytes",
        "false",
        "once for ten",
    ),
    "all_devices_are_the_first": ("return device;", "return 0;", "another device"),
}


def run(folder: Path, old: str = "", new: str = "") -> subprocess.CompletedProcess[str]:
    """launch_cases.cpp with launch.h, in which ``new`` replaces ``old``."""
    text = (ROOT / "csrc" / LAUNCH).read_text()
    assert not old or text.count(old) == 1
    (folder / LAUNCH).parent.mkdir(parents=True)
    (folder / LAUNCH).write_text(text.replace(old, new) if old else text)
    shutil.copy(ROOT / "csrc" / "cuda" / "device" / "device.h", folder / LAUNCH.parent)
    program = folder / "launch_cases"
    source = Path(__file__).with_name("launch_cases.cpp")
    # Without CUDA's runtime, in whose place the program has functions of its own.
    command = ["nvcc", "-std=c++17", "-x", "c++", "-cudart", "none", f"-I{folder}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)


def test_kernels_begin_early_where_their_code_waits_and_memory_is_allowed_once(
    tmp_path: Path,
) -> None:
    if not HAS_NVCC:  # CUDA's headers are needed.
        return
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    if not HAS_NVCC:
        return
    old, new, said = FAULTS[name]
    done = run(tmp_path, old, new)
    assert done.returncode == 1 and said in done.stdout, done.stdout
