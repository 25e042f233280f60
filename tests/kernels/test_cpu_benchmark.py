"""The benchmark of the CPU kernels runs, and its bare loops do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.attention_cpu import __main__ as attention_cpu
from benchmarks.attention_cpu import parts
from benchmarks.attention_cpu.kernels import Sizes
from benchmarks.common import memory
from data_plane.kernels.backends.cpu import cpu_isa


@pytest.mark.parametrize("part", ["kernels", "shared", "sparse"])
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
            "kernels": {"read_bandwidth", "memcpy", "swap_in", "prefill", "torch/decode/bf16/g1"},
            "shared": {"bf16/g1, shared", "e4m3/g8, copies"},
            "sparse": {"decode, 1 block in 1", "prefill, 1 block in 16"},
        }[part]
    )
    assert ("fused_products" in names) == (part == "kernels" and cpu_isa() != "baseline")
    printed = capsys.readouterr().out
    assert all(f"| {name}" in printed for name in names if not name.startswith("torch"))
    assert part != "kernels" or "% of read | " in printed
