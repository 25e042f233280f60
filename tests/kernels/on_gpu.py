"""What only a GPU can show.

benchmarks/gpu/first.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

import pytest
import torch
from backends import chosen_backend, in_place_of_the_cpu
from kernel_cases import FLOATS, FP8, Case, assert_same_bits, build

from data_plane.kernels.arguments import AttentionArguments

LENS = ((1, 900), (1, 17), (1, 512), (1, 1))


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
