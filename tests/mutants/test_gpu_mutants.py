"""Faults that only a GPU shows are found by tests on the simulated one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_programs import PYTEST, ROOT, run_on_simulated_gpu

COPIED = (
    *("kvplane", "control_plane", "data_plane", "csrc"),
    *("tests/gpu_sim", "tests/kernels", "tests/helpers"),
)


class Fault(NamedTuple):
    """``file`` has ``old`` once; the tests ``only`` of ``tests`` fail with ``new`` in its place."""

    file: str
    old: str
    new: str
    tests: str
    only: str


DATA_PLANE = ("tests/kernels/on_gpu_data_plane.py", "random_plans")
PLANE_CACHE = ("tests/gpu_sim/on_gpu_plane_cache.py", "greedy_with_padding")
MUTANTS = {
    "an_empty_tensor_is_viewed_as_bytes": Fault(
        "data_plane/memory/upload.py", "if tensor.numel() == 0:", "if False:", *DATA_PLANE
    ),
    "token_ids_stay_on_the_host": Fault(
        "kvplane/transformers/models/packed.py",
        "input_ids=torch.tensor([tokens], device=model.device)",
        "input_ids=torch.tensor([tokens])",
        *PLANE_CACHE,
    ),
    "positions_stay_on_the_host": Fault(
        "kvplane/transformers/models/packed.py",
        "position_ids=torch.tensor([positions], device=model.device)",
        "position_ids=torch.tensor([positions])",
        *PLANE_CACHE,
    ),
    "the_eager_probe_reads_ids_of_the_host": Fault(
        "kvplane/transformers/models/probe.py",
        "input_ids=torch.tensor([ids], device=model.device)",
        "input_ids=torch.tensor([ids])",
        *PLANE_CACHE,
    ),
    "the_probe_s_executor_gets_tensors_of_the_gpu": Fault(
        "kvplane/transformers/models/probe_planes.py",
        "there = (query.cpu(), key.cpu(), None if value is None else value.cpu())",
        "there = (query, key, value)",
        *PLANE_CACHE,
    ),
    "the_probe_s_output_stays_on_the_host": Fault(
        "kvplane/transformers/models/probe_planes.py",
        "return out.to(query.device)",
        "return out",
        *PLANE_CACHE,
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found_on_a_simulated_gpu(name: str, tmp_path: Path) -> None:
    fault, folder = MUTANTS[name], tmp_path / "tree"
    for part in COPIED:
        ignored = shutil.ignore_patterns("build", "*.so", "__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    (folder / "build").symlink_to(ROOT / "build")  # where the sources' builds are kept
    file = folder / fault.file
    sound = file.read_text()
    assert sound.count(fault.old) == 1
    file.write_text(sound.replace(fault.old, fault.new))
    words = (*PYTEST, "-x", fault.tests, "-k", fault.only)
    done = run_on_simulated_gpu(*words, out=tmp_path, root=folder)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
