"""The CPU's measurements find cold caches, go through passes, and say which goals are met."""

from __future__ import annotations

import json
import time
from pathlib import Path

import kvplane_kernels
import numpy as np
import pytest
import torch

from benchmarks import attention_idle, attention_prefill, attention_profile, attention_shared
from benchmarks.attention_cpu import __main__ as attention_cpu
from benchmarks.attention_cpu import rows as attention_rows
from benchmarks.attention_cpu.limits import limits, products_of_prefill
from benchmarks.attention_cpu.limits import main as print_limits
from benchmarks.attention_cpu.report import as_json
from benchmarks.attention_cpu.rows import Sizes
from benchmarks.attention_cpu.tables import tables
from benchmarks.common import memory
from benchmarks.common.calls import BILLIONS_OF_PRODUCTS, Calls, Pass, call_in_rounds
from data_plane.kernels.backends.cpu import CpuKernels, cpu_isa

TINY = Sizes(32, 1 << 16, 8, 32, 1)
BF16 = torch.bfloat16


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 1 << 16)


def test_caches_are_emptied_before_each_call_that_is_not_warm_and_that_is_not_timed() -> None:
    order: list[str] = []

    def empty() -> None:
        order.append("empty")
        time.sleep(0.05)

    cold = Calls("cold", "GB/s", 1, lambda: order.append("cold"))
    warm = Calls("warm", "GB/s", 1, lambda: order.append("warm"), is_warm=True)
    call_in_rounds([cold, warm], empty, num_passes=2, num_rounds=2)
    assert order == ["empty", "cold", "warm"] * 6
    assert all(seconds < 0.05 for p in cold.passes for seconds in p.seconds)


def test_only_pages_in_the_cache_are_warm(small_caches: None) -> None:
    decodes = attention_profile.Decode.all_of("bf16", BF16, 16, [1])
    assert len(decodes) == 3
    for decode in decodes:
        assert {place: calls.is_warm for place, calls in decode.places.items()} == {
            "cache": True,
            "in order": False,
            "random": False,
        }
        assert decode.half_size.is_warm
    rows = attention_cpu.measure(TINY, num_threads=1, num_passes=1)
    assert any(row.name == "torch/bf16/g1" for row in rows)
    assert not any(row.is_warm for row in rows)


def test_caches_are_emptied_by_several_times_what_the_last_level_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, size in enumerate(("48K\n", "2M\n", "1024K\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert memory.last_level_cache_bytes(tmp_path) == 2 << 20
    assert memory.last_level_cache_bytes(tmp_path / "none") == memory.UNKNOWN_CACHE_BYTES
    read: list[int] = []
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 2 << 20)
    monkeypatch.setattr(memory, "read_runs", lambda of, offsets, size, _: read.append(of.nbytes))
    memory.cold_caches(num_threads=2)()
    assert sum(read) >= 4 * (2 << 20)


@pytest.mark.parametrize("num_threads", (1, 3))
def test_runs_are_all_read_and_those_of_pages_are_in_the_order_of_decode(num_threads: int) -> None:
    pool = torch.randn(6, 2, 2, 3, 4, 32).to(BF16)
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


def test_idleness_is_measured_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_idle, "CONTEXT_TOKENS", 32)
    out = tmp_path / "idle.json"
    attention_idle.main(["--rounds", "3", "--threads", "2", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["idle_ms"] for row in rows] == [0, 0.2, 5, 20]
    assert all(row["p10"] >= row["p50"] > 0 for row in rows)
    assert "| 20 | " in capsys.readouterr().out


@pytest.mark.parametrize("num_threads", (1, 3))
def test_a_bare_loop_says_how_many_products_it_computed(
    every_cpu_isa: str, num_threads: int
) -> None:
    of_round = {"avx2": 8, "avx512": 16, "avx512bf16": 32}.get(every_cpu_isa, 0)
    computed = kvplane_kernels.fused_products(num_rounds=10, num_threads=num_threads)
    assert computed == 10 * num_threads * 4 * 12 * of_round


def test_prefill_is_measured_beside_a_bare_loop_and_torch(
    every_cpu_isa: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(attention_prefill, "BARE_ROUNDS", 1000)
    monkeypatch.setattr(attention_rows, "KERNELS", CpuKernels())
    out, num_threads = tmp_path / "prefill.json", torch.get_num_threads()
    words = ["--tokens", "32", "--rounds", "3", "--json", str(out)]
    if every_cpu_isa == "baseline":
        with pytest.raises(SystemExit, match="baseline has no fused products"):
            attention_prefill.main(words)
        return
    try:
        attention_prefill.main(words)
    finally:
        torch.set_num_threads(num_threads)
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["bare loop", "prefill", "torch"]
    assert all(row["best"] >= row["median"] > 0 for row in rows)
    assert "| bare loop | " in capsys.readouterr().out


def test_products_of_a_prompt_are_those_that_its_queries_see() -> None:
    heads, of_pair = 32, 2 * 128
    assert products_of_prefill(3) == (1 + 2 + 3) * heads * of_pair


def test_what_is_reached_stands_beside_what_bare_loops_reach() -> None:
    rows = [
        *(rated("read_pages/bf16", 20), rated("decode/bf16/g8", 8)),
        *(rated("decode/e4m3/g4", 5), rated("decode/fp32/g1", 9), rated("torch/bf16/g8", 4)),
        Calls("prefill", "tokens/s", 3, lambda: None, passes=[Pass([1.0], [1.0])]),
    ]
    assert list(limits(rows)) == []
    bare = rated("fused_products", 48, BILLIONS_OF_PRODUCTS)
    bare.amount = 48e9
    assert list(limits([*rows, bare]))[3:] == [
        "| decode/bf16/g8 | 8.0 | 20.0 | 40% | 12.0 | 67% |",
        "| decode/e4m3/g4 | 5.0 | | | 12.0 | 42% |",
        "| prefill, tokens/s | 3.0 | | | 2,929,687.5 | 0% |",
    ]


def test_a_saved_run_is_compared_with_its_bare_loops_as_it_was_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_tokens = Sizes().prefill_tokens
    prefill = Calls("prefill", "tokens/s", num_tokens, lambda: None, passes=[Pass([0.5], [0.5])])
    bare = rated("fused_products", 48, BILLIONS_OF_PRODUCTS)
    bare.amount = 48e9
    rows = [rated("read_pages/bf16", 20), rated("decode/bf16/g1", 8), prefill, bare]
    saved = tmp_path / "run.json"
    saved.write_text(json.dumps(as_json(rows, {})))
    print_limits([str(saved)])
    assert capsys.readouterr().out == "\n".join(limits(rows)) + "\n"


def test_torch_is_held_to_the_instruction_set_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*attention_prefill.VARIABLES, "KVPLANE_KERNELS_ISA", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    environment = attention_prefill.restarted(["--isa", "avx2", "--tokens", "64"])
    assert environment is not None
    assert environment["KVPLANE_KERNELS_ISA"] == "avx2"
    assert environment["MKL_ENABLE_INSTRUCTIONS"] == environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert attention_prefill.restarted(["--isa", "avx2"]) is None


def test_a_common_prefix_is_measured_with_shared_reads_without_and_with_copies(
    small_caches: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shared.json"
    words = ["--sequences", "3", "--prefix", "512", "--own", "16", "--rounds", "2"]
    attention_shared.main([*words, "--threads", "2", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows][::3] == ["bf16/g1", "e4m3/g1"] and len(rows) == 6
    for row in rows:
        assert [len(row["seconds"][side]) for side in ("shared", "apart", "copies")] == [2, 2, 2]
    assert "| e4m3/g8 | " in capsys.readouterr().out


def test_a_common_prefix_has_the_same_blocks_and_copies_have_not() -> None:
    case = attention_shared.cases_of("bf16", 3, 512, 16, 1)[0]
    shared, apart, copies = (case.calls[side]() for side in attention_shared.SIDES)
    assert torch.equal(shared, apart)
    assert torch.equal(shared[0], copies[0]) and not torch.equal(shared[1], copies[1])


def test_a_figure_is_the_median_of_the_passes_medians_after_a_round_that_does_not_count() -> None:
    row = Calls("x", "tokens/s", 12, lambda: None, is_warm=True)
    call_in_rounds([row], lambda: None, num_passes=3, num_rounds=4)
    assert [len(p.seconds) for p in row.passes] == [4, 4, 4]
    row.passes = [Pass([1, 2, 9], [2, 4, 18]), Pass([3, 3, 3], [6, 6, 6]), Pass([4, 4, 1], [8] * 3)]
    rate = row.rate()
    assert (rate.middle, rate.lowest, rate.highest) == (4, 3, 6)
    assert row.rate_of_core().middle == 2 and row.best_rate_of_core().highest == 6
    assert row.quantile(1.0) == 12 and row.num_samples == 9


def rated(name: str, rate: float, unit: str = "GB/s") -> Calls:
    amount = rate * (1e9 if unit == "GB/s" else 1)
    return Calls(name, unit, amount, lambda: None, passes=[Pass([1.0], [2.0])])


def test_the_tables_say_what_is_reached_and_whether_each_goal_is_met() -> None:
    rows = [
        *(rated("read_bandwidth", 40), rated("memcpy", 20)),
        *(rated("decode/bf16/g1", 34), rated("torch/bf16/g1", 17.1)),
        *(rated("decode/fp32/g8", 13), rated("torch/fp32/g8", 10)),
        *(rated("decode/bf16/g8", 19.6), rated("decode/e4m3/g1", 10)),
        *(rated("swap_in", 15.9), rated("reshape_and_cache", 5)),
        *(rated("prefill", 2000, "tokens/s"), rated("torch_prefill", 1000, "tokens/s")),
    ]
    assert "85.0 % of read | 70 %: met" in tables(rows, "avx2")
    by_clock, by_core = tables(rows, "avx512bf16").split("Per second")
    for line in (
        "| decode/bf16/g1 | 34.0 | 34.0 to 34.0 | 85.0 % of read | 85 %: met "
        "| 17.1 | 1.99 | 2: missed |",
        "| decode/fp32/g8 | 13.0 | 13.0 to 13.0 | 32.5 % of read | | 10.0 | 1.30 | 1.3: met |",
        "| decode/bf16/g8 | 19.6 | 19.6 to 19.6 | 49.0 % of read | 50 %: missed | | | |",
        "| decode/e4m3/g1 | 10.0 | 10.0 to 10.0 | 25.0 % of read | | | | |",
        "| swap_in | 15.9 | 15.9 to 15.9 | 79.5 % of memcpy | 80 %: missed | | | |",
        "| reshape_and_cache | 5.0 | 5.0 to 5.0 | 25.0 % of memcpy | | | | |",
        "| prefill, tokens/s | 2,000 | 2,000 to 2,000 | | | 1,000 | 2.00 | 1.5: met |",
    ):
        assert f"\n{line}\n" in by_clock
    assert "| memcpy | 20.0 | 20.0 to 20.0 | | | | | |" in by_clock
    assert "\n| torch" not in by_clock
    assert "| decode/bf16/g1 | 17.0 | " in by_core


def test_both_commands_measure_print_and_save(
    small_caches: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(attention_cpu, "QUICK", TINY)
    monkeypatch.setattr(attention_profile, "QUICK", TINY)
    out, num_threads = tmp_path / "out.json", torch.get_num_threads()
    words = ["--quick", "--runs", "2", "--threads", "2", "--json", str(out)]
    try:
        attention_cpu.main(words)
    finally:
        torch.set_num_threads(num_threads)
    printed = capsys.readouterr().out
    saved = json.loads(out.read_text())
    names = {row["name"] for row in saved["rows"]}
    assert names >= {"read_bandwidth", "memcpy", "copy_blocks", "swap_out", "swap_in", "prefill"}
    assert all(r["p50_lowest"] <= r["p50"] <= r["p50_highest"] for r in saved["rows"])
    assert {row["num_samples"] for row in saved["rows"]} == {2} and saved["machine"]["runs"] == 2
    assert "| decode/fp32/g8 | " in printed and " of read | " in printed
    assert ("| reached | read_pages | of it |" in printed) == (cpu_isa() != "baseline")
    attention_profile.main(words)
    printed = capsys.readouterr().out
    assert len(json.loads(out.read_text())["rows"]) == 18 == printed.count("| decode/")
