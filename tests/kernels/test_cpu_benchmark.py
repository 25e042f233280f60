"""The benchmark of the CPU kernels runs, and its bare loops do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import kvplane_kernels
import numpy as np
import pytest
import torch

from benchmarks.attention_cpu import __main__ as attention_cpu
from benchmarks.attention_cpu import parts
from benchmarks.attention_cpu.kernels import Sizes
from benchmarks.common import memory
from data_plane.kernels.backends.cpu import cpu_isa


@pytest.mark.parametrize("num_threads", (1, 3))
def test_runs_are_all_read_and_those_of_pages_are_in_the_order_of_decode(num_threads: int) -> None:
    pool = torch.randn(6, 2, 2, 3, 4, 32).to(torch.bfloat16)
    tables = torch.tensor([[4, 0], [3, 5]])
    offsets = memory.page_offsets(pool, tables)
    run_bytes = pool[0, 0, 0, 0].nbytes
    first_layer = [run_bytes * i for i in (4 * 12, 0, 4 * 12 + 3, 3)]
    assert offsets[:4].tolist() == first_layer
    assert offsets[24:28].tolist() == [at + 6 * run_bytes for at in first_layer]
    assert len(offsets.unique()) == 4 * 12 == len(offsets)
    words = pool[tables.flatten()].view(torch.int64).flatten().numpy()
    wanted = int(np.bitwise_xor.reduce(words)) % 2**64
    assert memory.read_runs(pool, offsets, run_bytes, num_threads) == wanted


@pytest.mark.parametrize("num_threads", (1, 3))
def test_a_bare_loop_says_how_many_products_it_computed(cpu: str, num_threads: int) -> None:
    of_round = {"avx2": 8, "avx512": 16, "avx512bf16": 32}.get(cpu, 0)
    computed = kvplane_kernels.fused_products(num_rounds=10, num_threads=num_threads)
    assert computed == 10 * num_threads * 4 * 12 * of_round


@pytest.mark.parametrize("part", ["kernels", *parts.PARTS])
def test_each_part_is_measured_printed_and_saved(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(attention_cpu, "QUICK", Sizes(32, 1 << 16, 8, 32))
    monkeypatch.setattr(parts, "NUM_SHARING", 3)
    out, num_threads = tmp_path / "new" / "out.json", torch.get_num_threads()
    try:
        words = ["--quick", "--rounds", "1", "--runs", "2", "--threads", "2", "--json", str(out)]
        attention_cpu.main([part, *words])
    finally:
        torch.set_num_threads(num_threads)
    rows = json.loads(out.read_text())["rows"]
    assert all(len(row["seconds"]) == 2 and row["least_cpu_s"] > 0 for row in rows)
    names = {row["name"] for row in rows}
    assert (
        names
        >= {
            "kernels": {"read_bandwidth", "memcpy", "swap_in", "prefill", "torch/bf16/g1"},
            "shared": {"bf16/g1, shared", "e4m3/g8, copies"},
        }[part]
    )
    assert ("fused_products" in names) == (part == "kernels" and cpu_isa() != "baseline")
    printed = capsys.readouterr().out
    assert all(f"| {name}" in printed for name in names if not name.startswith("torch"))
    assert part != "kernels" or "% of read | " in printed
