"""Faults that only a GPU shows are found by tests on the simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.gpu_programs import PYTEST, run_on_simulated_gpu
from tests.helpers.source_faults import Fault, copy_with

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
        "kvplane/runtime/probe_planes.py",
        "there = (query.cpu(), key.cpu(), None if value is None else value.cpu())",
        "there = (query, key, value)",
        *PLANE_CACHE,
    ),
    "the_probe_s_output_stays_on_the_host": Fault(
        "kvplane/runtime/probe_planes.py",
        "return out.to(query.device)",
        "return out",
        *PLANE_CACHE,
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found_on_a_simulated_gpu(name: str, tmp_path: Path) -> None:
    fault, folder = MUTANTS[name], tmp_path / "tree"
    copy_with(fault, folder, csrc=True)
    words = (*PYTEST, "-x", fault.tests, "-k", fault.only)
    done = run_on_simulated_gpu(*words, out=tmp_path, root=folder)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
