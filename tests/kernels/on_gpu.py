"""What only a GPU can show.

benchmarks/gpu/first.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

import pytest
import torch
from backends import chosen_backend, in_place_of_the_cpu
from kernel_cases import FLOATS, FP8, Case, assert_same_bits, build
from probes import STEPS, assert_same_numbers

from data_plane.kernels.arguments import AttentionArguments

LENS = ((1, 900), (1, 17), (1, 512), (1, 1))
TYPES = (*((dtype, None) for dtype in FLOATS), *zip(FLOATS[1:], FP8, strict=True))


@pytest.mark.parametrize("pages_dtype", (None, *FP8), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_graph_captured_at_some_lengths_replays_at_others(
    dtype: torch.dtype, pages_dtype: torch.dtype | None
) -> None:
    backend = chosen_backend()
    case = Case(lens=LENS, heads=(14, 2), head_size=128, dtype=dtype, pages_dtype=pages_dtype)
    with in_place_of_the_cpu(backend):
        batch = build(case)
        expected, expected_lse = batch.attend()
    tensors = (batch.query, batch.pages, batch.block_tables, batch.query_starts, batch.context_lens)
    query, pages, tables, starts, lens = (tensor.to("cuda") for tensor in tensors)
    arguments = AttentionArguments(
        query, pages, tables, starts, lens, batch.options, max_query_len=1
    )
    out = torch.zeros_like(query)
    lse = torch.zeros(query.shape[:2], device="cuda")
    num_bytes = backend.kernels.attention_workspace_bytes(arguments)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def run() -> None:
        backend.kernels.paged_attention(arguments, out=out, lse=lse, workspace=workspace)

    right_lens = lens.clone()
    lens.fill_(1)  # Captured at other lengths than it is replayed at.
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    lens.copy_(right_lens)
    out.zero_()
    graph.replay()
    backend.kernels.check_faults()
    assert_same_bits(out.cpu(), expected)
    assert_same_bits(lse.cpu(), expected_lse)


@pytest.mark.parametrize("name", STEPS)
def test_each_step_is_in_the_emulator_what_it_is_in_hardware(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = STEPS[name]
    answers = []
    for backend_name in ("cuda", "emulated"):
        monkeypatch.setenv("KVPLANE_DEVICE_BACKEND", backend_name)
        backend = chosen_backend()
        answers.append(step.run(backend.native, backend.torch_device, name))
    hardware, emulated = answers
    if name == "exp2":  # The one instruction that approximates.
        torch.testing.assert_close(hardware, emulated, rtol=2**-21, atol=2**-126)
    else:
        assert_same_numbers(emulated, hardware, step)


@pytest.mark.parametrize(("dtype", "pages_dtype"), TYPES, ids=str)
@pytest.mark.parametrize("head_size", (40, 64, 128, 192, 256))
def test_the_emulator_gives_what_the_hardware_gives(
    head_size: int,
    dtype: torch.dtype,
    pages_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(
        lens=((1, 300), (3, 130), (70, 200)),
        heads=(6, 2),
        head_size=head_size,
        dtype=dtype,
        pages_dtype=pages_dtype,
        scales=None if pages_dtype is None else "head",
    )
    answers = []
    for name in ("cuda", "emulated"):
        monkeypatch.setenv("KVPLANE_DEVICE_BACKEND", name)
        with in_place_of_the_cpu(chosen_backend()):
            answers.append(build(case).attend())
    (out, lse), (emulated, emulated_lse) = answers
    # Sums are added up in another order, so a result may be rounded to the neighbour.
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out, emulated, rtol=tolerance, atol=tolerance / 8)
    torch.testing.assert_close(lse, emulated_lse, rtol=2e-6, atol=5e-6)
