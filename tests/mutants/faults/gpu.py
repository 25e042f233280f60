"""Faults that only a GPU shows, which tests on the simulated one notice."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.machines import SimulatedGpu

DATA_PLANE = SimulatedGpu(("tests/kernels/on_gpu_data_plane.py",), "random_plans")
PLANE_CACHE = SimulatedGpu(("tests/gpu_sim/on_gpu_plane_cache.py",), "greedy_with_padding")

FAULTS = (
    Fault(
        "an_empty_tensor_is_viewed_as_bytes",
        "data_plane/memory/upload.py",
        "if tensor.numel() == 0:",
        "if False:",
        DATA_PLANE,
    ),
    Fault(
        "token_ids_stay_on_the_host",
        "kvplane/transformers/models/packed.py",
        "input_ids=torch.tensor([tokens], device=model.device)",
        "input_ids=torch.tensor([tokens])",
        PLANE_CACHE,
    ),
    Fault(
        "positions_stay_on_the_host",
        "kvplane/transformers/models/packed.py",
        "position_ids=torch.tensor([positions], device=model.device)",
        "position_ids=torch.tensor([positions])",
        PLANE_CACHE,
    ),
    Fault(
        "the_eager_probe_reads_ids_of_the_host",
        "kvplane/transformers/models/probe.py",
        "input_ids=torch.tensor([ids], device=model.device)",
        "input_ids=torch.tensor([ids])",
        PLANE_CACHE,
    ),
    Fault(
        "the_probe_s_executor_gets_tensors_of_the_gpu",
        "kvplane/runtime/probe_planes.py",
        "there = (query.cpu(), key.cpu(), None if value is None else value.cpu())",
        "there = (query, key, value)",
        PLANE_CACHE,
    ),
    Fault(
        "the_probe_s_output_stays_on_the_host",
        "kvplane/runtime/probe_planes.py",
        "return out.to(query.device)",
        "return out",
        PLANE_CACHE,
    ),
)
