"""The code of the GPU's measurements runs, on the emulator and on a few tokens, and tells a wrong
answer; its verdicts and tables say what the rows say.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_build import emulated_module

from benchmarks.gpu import measure
from benchmarks.gpu.cases import peers, shapes
from benchmarks.gpu.cases.attention import estimated_seconds, measure_attention
from benchmarks.gpu.cases.bandwidth import measure_bandwidths
from benchmarks.gpu.cases.copies import INSIDE, SWAPPED, Blocks, measure_copies
from benchmarks.gpu.cases.problem import MAX_ERROR, Problem
from benchmarks.gpu.cases.shapes import Shape
from benchmarks.gpu.device.machine import DEFAULT_SPLIT, Machine
from benchmarks.gpu.device.timing import Once, Stopwatch, Watch
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.table import tables
from benchmarks.gpu.verdict import COPIES, SWAPS, summary, verdicts

CPU = torch.device("cpu")
LEFT_OUT = [f"decode/x {Shape(batch, 512)}: b: c" for batch in (1, 2)]


def emulated(watch: Watch | None = None) -> Machine:
    native = emulated_module()
    native.set_seed(0)
    return Machine(CPU, native, watch or Once(), large_bytes=1 << 16)


@pytest.mark.timeout(300)
def test_every_measurement_runs_and_finds_right_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[Machine] = []

    def machine_of(watch: Watch) -> Machine:
        made.append(emulated(watch))
        return made[0]

    assert measure.main(["--tiny"], machine_of) == 0
    said = capsys.readouterr().out
    assert "wrong results: 0; left out: 0" in said
    names = {json.loads(line)["name"] for line in said.splitlines() if line.startswith("{")}
    assert names >= {
        *("copy_bandwidth", "read_bandwidth", "link_in", "link_out"),
        *("decode", "append", "shared", "shared/alone", "reshape_and_cache"),
        *("copy_blocks", "gather_blocks", "scatter_blocks", "swap_out", "swap_in"),
    }


def test_peers_are_checked_and_those_that_can_not_run_are_named() -> None:
    m = Measurement(emulated(), seconds=60)
    measure_attention(m, (Shape(2, 40, 4, 2, 32),))
    assert not m.wrong
    # Torch has its flash attention for CPUs too; the others need a GPU, or are not installed.
    assert {row["name"] for row in m.rows} == {"decode", "decode/sdpa_flash"}
    theirs = ("sdpa_cudnn", "varlen", "varlen_paged", "flash_attention_3", "flashinfer")
    for name in (*theirs, "flashinfer_tensor_cores"):
        assert any(line.startswith(f"decode/{name} ") for line in m.left_out)


@pytest.mark.parametrize("kv_dtype", shapes.KV_DTYPES)
def test_both_of_flashinfers_decode_kernels_are_peers(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Wrapper:
        """Stands in for FlashInfer's, which is not installed here."""

        def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
            assert layout == "HND"
            asked.append(use_tensor_cores)

        def plan(self, *_: Any, **__: Any) -> None:
            pass

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 16)
    made = peers.peers_of(Problem(Shape(2, 40, 4, 2, 32, kv_dtype=kv_dtype), CPU))
    for name in ("flashinfer", "flashinfer_tensor_cores"):
        made[name]()
    assert asked == [False, True]
    # For several new tokens there is one kernel.
    made = peers.peers_of(Problem(Shape(2, 40, 4, 2, 32, kv_dtype=kv_dtype, new=3), CPU))
    assert "flashinfer" in made and "flashinfer_tensor_cores" not in made


@pytest.mark.parametrize("new", (1, 20))
@pytest.mark.parametrize("kv_dtype", shapes.KV_DTYPES)
def test_a_wrong_answer_is_told(kv_dtype: str, new: int) -> None:
    torch.manual_seed(0)
    shape = Shape(3, 100, 4, 2, 32, kv_dtype=kv_dtype, new=new)
    problem = Problem(shape, CPU)
    right = problem.right_rows()
    answer = torch.zeros(problem.query.shape)
    taken = [sequence * new + row for sequence, row in problem.rows_to_check()]
    answer[taken] = right.float()
    assert problem.error(answer, right) < 1e-6
    answer[taken[-1], -1] *= 1.1
    assert problem.error(answer, right) > MAX_ERROR
    answer[taken[-1], 0, 0] = torch.nan
    assert not problem.error(answer, right) <= MAX_ERROR


def test_right_rows_see_their_past_and_no_more() -> None:
    shape = Shape(2, 33, 2, 2, 8, new=3)
    problem = Problem(shape, CPU)
    before = problem.right_rows()
    last = problem.tables[1, 2]
    problem.pages[last, :, :, 0] = 0  # Position 32: only the last token sees it.
    changed = (problem.right_rows() != before).flatten(1).any(dim=1)
    assert changed.tolist() == [False] * 5 + [True]


def test_what_is_too_late_or_too_large_is_left_out() -> None:
    m = Measurement(emulated(), seconds=0)
    measure_attention(m, (Shape(1, 16),))
    m.machine.free_bytes = lambda: 1000  # type: ignore[method-assign]
    m._seconds = 60
    measure_attention(m, (Shape(1, 16),))
    assert not m.rows
    assert ["no time left" in line or "GiB" in line for line in m.left_out] == [True, True]


def test_what_goes_wrong_is_kept_and_the_run_goes_on() -> None:
    m = Measurement(emulated(), seconds=60)

    def fail() -> None:
        raise RuntimeError("no such launch\nand more")

    def need_memory() -> None:
        raise torch.OutOfMemoryError("more than there is")

    m.attempt("theirs", fail)
    m.attempt("ours, too large", need_memory, is_ours=True)
    m.attempt("ours", fail, is_ours=True)
    assert m.left_out == [
        "theirs: RuntimeError: no such launch",
        "ours, too large: OutOfMemoryError: more than there is",
    ]
    assert m.wrong == ["ours RuntimeError: no such launch\nand more"]


def test_the_shapes_are_those_that_targets_speak_of() -> None:
    decodes = shapes.DECODES
    assert {s.kv_dtype for s in decodes} == set(shapes.KV_DTYPES)
    assert {1, 256} <= {s.batch for s in decodes} and {512, 131072} <= {s.context for s in decodes}
    assert {(s.heads, s.kv_heads) for s in decodes} >= {(32, 8), (8, 1), (28, 4), (32, 32)}
    assert {s.new for s in shapes.APPENDS} >= {4, 8, 64}
    assert {s.head for s in decodes} == {64, 128, 256} and {s.block for s in decodes} == {16, 64}
    assert len(set(decodes)) == len(decodes)
    assert {128, DEFAULT_SPLIT} < set(shapes.SPLITS) and sorted(shapes.SPLITS) == [*shapes.SPLITS]
    assert all(s.new > 1 for s in shapes.APPENDS)
    assert all(s.shared % 512 == 0 and s.context > s.shared >= 8192 for s in shapes.SHARED)
    expected = estimated_seconds((*decodes, *shapes.APPENDS, *shapes.SHARED), 0.1, 5)
    assert 30 < expected < 2 * measure.SECONDS  # what comes last may be left out
    held, _ = shapes.by_target(decodes)
    first = (*held, *shapes.SHARED, *shapes.APPENDS)
    assert estimated_seconds(first, 0.1, 5) < measure.SECONDS


@pytest.mark.parametrize("decodes", (shapes.DECODES, shapes.QUICK_DECODES))
def test_what_targets_are_held_against_comes_first_and_with_its_twin(
    decodes: tuple[Shape, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, others = shapes.by_target(decodes)
    assert sorted(map(str, (*held, *others))) == sorted(map(str, decodes))
    assert all(s.batch >= 16 and s.context >= 4096 for s in held)
    assert not any(s.batch >= 16 and s.context >= 4096 for s in others)
    for part in (held, others):
        assert part[1::2] == [replace(s, kv_dtype="float8_e4m3fn") for s in part[::2]]
    order: list[Shape] = []
    monkeypatch.setattr(measure, "measure_bandwidths", lambda m: None)
    monkeypatch.setattr(measure, "measure_copies", lambda m: None)
    monkeypatch.setattr(measure, "measure_attention", lambda m, some: order.extend(some))
    is_quick = decodes == shapes.QUICK_DECODES
    measure.measure_all(Measurement(emulated(), 1), Stopwatch(), is_quick, 1)
    assert order[: len(held)] == held and order[len(order) - len(others) :] == others


def test_a_bandwidth_that_can_not_be_measured_ends_nothing() -> None:
    m = Measurement(emulated(), seconds=60)
    m.machine.host_empty = lambda *_: torch.empty(1 << 60)  # type: ignore[method-assign]
    measure_bandwidths(m)
    assert {"copy_bandwidth", "read_bandwidth"} <= {row["name"] for row in m.rows}
    assert [line.partition(":")[0] for line in m.left_out] == ["link_out", "link_in"]

    class Broken:
        def seconds(self, work: Any, *, in_graph: bool = True) -> float:
            raise RuntimeError("no such launch")

    m = Measurement(emulated(Broken()), seconds=60)
    measure_bandwidths(m)
    assert not m.rows and not m.wrong
    names = [line.partition(":")[0] for line in m.left_out]
    assert {"copy_bandwidth", "read_bandwidth", "link_out", "link_in"} <= set(names)
    assert "read_bandwidth: no way to measure it worked" in m.left_out


def test_bandwidth_is_measured_on_what_memory_is_free() -> None:
    class OneSecond:
        def seconds(self, work: Any, *, in_graph: bool = True) -> float:
            return 1.0

    machine = emulated(OneSecond())
    machine.large_bytes = 1 << 40
    machine.free_bytes = lambda: 1 << 20  # type: ignore[method-assign]
    m = Measurement(machine, seconds=60)
    measure_bandwidths(m)
    assert not m.left_out
    rates = {row["name"]: row["p50"] * 1e9 for row in m.rows}
    assert rates["read_bandwidth"] == rates["link_out"] == 1 << 18
    assert rates["copy_bandwidth"] == 1 << 19
    machine.free_bytes = lambda: 1 << 10  # type: ignore[method-assign]
    m = Measurement(machine, seconds=60)
    measure_bandwidths(m)
    assert not m.rows and len(m.left_out) == 4
    assert all("too little" in line for line in m.left_out)


def test_bytes_and_operations_are_those_needed_at_least() -> None:
    shape = Shape(2, 100, 8, 4, 16)
    assert shape.kv_bytes == 2 * 2 * 100 * 4 * 16 * 2  # K and V, bf16
    assert Shape(2, 100, 8, 4, 16, kv_dtype="float8_e4m3fn").kv_bytes == shape.kv_bytes // 2
    shared = replace(shape, shared=48)
    assert shared.kv_bytes == 2 * 2 * (48 + 2 * 52) * 4 * 16 and shared.num_blocks == 3 + 2 * 4
    assert shape.num_blocks == 2 * 7
    assert shape.flops == 4 * 2 * 8 * 16 * 100
    assert Shape(1, 3, 1, 1, 8, new=3).flops == 4 * 8 * (1 + 2 + 3)
    assert Blocks(32, 1).block_bytes == 2 << 20 and Blocks(1, 8).copied_bytes == 8 * 64 << 10
    sizes = {b.block_bytes for b in (*INSIDE, *SWAPPED)}
    assert min(sizes) == 8 << 10 and max(sizes) == 2 << 20


def decode_row(name: str = "decode", rate: float = 3900.0, us: float = 100.0, **more: Any) -> Any:
    kv_dtype, batch = more.pop("kv_dtype", "bfloat16"), more.pop("batch", 64)
    shape = Shape(batch, 8192, kv_dtype=kv_dtype, shared=more.pop("shared", 0))
    row = {"name": name, "unit": "GB/s", "p50": rate, "us": us, **shape.named(), **more}
    return row if "/" in name else {"split": 512, **row}


def result_of(*rows: Any) -> dict[str, Any]:
    bandwidths = {"copy_bandwidth": 4000, "read_bandwidth": 4400, "link_out": 50, "link_in": 55}
    first = [{"name": n, "unit": "GB/s", "p50": v, "by": "x"} for n, v in bandwidths.items()]
    machine = {"gpu": "NVIDIA X", "torch": "2.11.0", "cuda": "13.0", "python": "3.12.3"}
    machine |= {"date": "2026-11-20", "split_tokens": 512, "method": "median"}
    result: dict[str, Any] = {"machine": machine, "left_out": LEFT_OUT, "wrong": []}
    return result | {"rows": [*first, *rows], "not_timed": []}


def without(name: str, result: dict[str, Any]) -> dict[str, Any]:
    return result | {"rows": [row for row in result["rows"] if row["name"] != name]}


def copy_row(name: str, rate: float) -> Any:
    about = {"block_bytes": 65536, "num_blocks": 9, "order": "runs", "kv_dtype": "bfloat16"}
    return {"name": name, "unit": "GB/s", "p50": rate, "us": 5.0, **about}


def met(*rows: Any) -> list[bool | None]:
    return [v.met for v in verdicts(result_of(*rows))]


def test_decode_is_held_against_copy_and_read_bandwidth_and_the_best_peer() -> None:
    assert met(decode_row(rate=4100)) == [True, True]  # 93 % of read are 4092.
    assert met(decode_row(rate=4091)) == [True, False]
    assert met(decode_row(rate=3599)) == [False, False]
    peer, better_peer = decode_row("decode/sdpa_flash", 3000), decode_row("decode/varlen", 3500)
    assert met(decode_row(rate=3600), peer) == [True, True]
    assert met(decode_row(rate=3600), peer, better_peer) == [True, False]
    # A peer of another batch, or over fp8, is none.
    assert met(decode_row(rate=3600), {**peer, "batch": 16}) == [True, False]
    assert met(decode_row(rate=3600), {**peer, "kv_dtype": "float8_e4m3fn"}) == [True, False]


def test_only_large_batches_at_the_usual_split_are_held_to_targets() -> None:
    assert met(decode_row(rate=1) | {"batch": 15}) == []
    assert met(decode_row(rate=1) | {"context": 4095}) == []
    assert met(decode_row(rate=1) | {"split": 1024}) == []


def test_fp8_is_held_against_the_time_of_bf16() -> None:
    for us, right in ((58.8, True), (58.9, False)):
        found = verdicts(result_of(decode_row(us=100), decode_row(us=us, kv_dtype="float8_e4m3fn")))
        assert [v.met for v in found if v.target.startswith("fp8")] == [right]
    assert met(decode_row(kv_dtype="float8_e4m3fn")) == [None]


def test_a_shared_prefix_is_held_against_the_time_without_sharing() -> None:
    alone = decode_row("shared/alone", us=300.0, shared=4096, estimated_us=[280.0, 320.0])
    for us, right in ((100.0, True), (101.0, False)):
        row = decode_row("shared", us=us, shared=4096, estimated_us=[70.0, 100.0])
        found = verdicts(result_of(row, alone))
        assert [v.met for v in found] == [right]
        assert found[0].figures.endswith("× (estimated 3.2 to 4.0)")
        assert "4096 tokens shared" in found[0].case
    assert met(decode_row("shared", shared=4096)) == [None]
    assert met(decode_row("shared", shared=4096), {**alone, "batch": 16}) == [None]


def test_copies_are_held_against_copy_bandwidth_and_swaps_against_their_link() -> None:
    assert met(copy_row("copy_blocks", 3600), copy_row("gather_blocks", 3599)) == [True, False]
    assert met(copy_row("swap_out", 45), copy_row("swap_in", 45)) == [True, False]


def test_the_summary_tells_met_from_missed_and_not_measured() -> None:
    lines = summary(verdicts(result_of(decode_row(rate=3700), copy_row("copy_blocks", 3999))))
    assert [line.split(":")[0] for line in lines] == [
        *("met", "missed", "not measured", "not measured", "met", "not measured")
    ]


def lost(row: Any, *, wrong: bool) -> Any:
    return {**row, "wrong": wrong}


def summary_of(rows: list[Any], not_timed: list[Any]) -> list[str]:
    return summary(verdicts(result_of(*rows) | {"not_timed": not_timed}))


def test_a_case_whose_answer_was_wrong_is_missed() -> None:
    good, bad = decode_row(rate=4200), decode_row(batch=256)
    lines = summary_of([good], [lost(bad, wrong=True), lost(bad, wrong=True)])
    assert lines[0] == "missed: decode ≥ 90% of copy bandwidth (1 of 2 cases)"
    assert lines[1].startswith("missed: ") and lines[2].startswith("not measured: ")
    # Also where it was wrong at another split only, or the row was timed before.
    assert summary_of([good], [lost(good, wrong=True)])[0].endswith("(0 of 1 cases)")
    fp8 = decode_row(kv_dtype="float8_e4m3fn", batch=256)
    assert summary_of([good], [lost(fp8, wrong=True)])[2].startswith("missed: fp8")
    copied, swapped = copy_row("gather_blocks", 1), copy_row("swap_in", 1)
    lines = summary_of([copy_row("copy_blocks", 4000)], [lost(copied, wrong=True)])
    assert lines[4].startswith("missed: ") and lines[4].endswith("(1 of 2 cases)")
    assert summary_of([], [lost(swapped, wrong=True)])[5].startswith("missed: swaps")


def test_where_cases_were_left_out_a_target_is_met_so_far() -> None:
    good, late = decode_row(rate=4200), decode_row(batch=256)
    lines = summary_of([good], [lost(late, wrong=False), lost(late, wrong=False)])
    assert lines[0] == "met so far, 1 left out: decode ≥ 90% of copy bandwidth (1 of 1 cases)"
    assert lines[1].startswith("met so far, 1 left out: ")
    assert summary_of([decode_row(rate=1)], [lost(late, wrong=False)])[0].startswith("missed, 1 ")
    assert summary_of([], [lost(late, wrong=False)])[0].startswith("not measured, 1 left out: ")
    # What has a row, and what no target speaks of, is not missing.
    small = lost(decode_row(batch=1), wrong=False)
    assert summary_of([good], [lost(good, wrong=False), small])[0].startswith("met: ")
    # Nor can anything be met without what it is held against.
    rows = [copy_row("swap_out", 50), copy_row("swap_in", 55)]
    found = verdicts(without("link_in", result_of(*rows)))
    assert summary(found)[5].startswith("met so far, 1 left out: swaps")
    assert not any(v.met for v in verdicts(without("copy_bandwidth", result_of(good)))[:1])


def test_what_is_not_timed_is_kept_by_its_case() -> None:
    m = Measurement(emulated(), seconds=0)
    shape = Shape(16, 4096, new=1)
    measure_attention(m, (shape,))
    m._seconds = 60
    m.machine.free_bytes = lambda: 1000  # type: ignore[method-assign]
    measure_attention(m, (shape,))
    assert m.not_timed == 2 * [{"name": "decode", **shape.named(), "wrong": False}]
    del m.machine.free_bytes
    m.machine.kernels = lambda split=0: 1 / 0  # type: ignore[method-assign, assignment]
    measure_attention(m, (Shape(1, 16),))
    measure_copies(m, tiny=True)
    names = {case["name"] for case in m.not_timed if case["wrong"]}
    assert names == {"decode", *COPIES, *SWAPS}


def test_a_wrong_answer_is_not_timed_and_kept_by_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Measurement(emulated(), seconds=60)

    def answer_nothing(kernels: Any, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    monkeypatch.setattr(type(m.machine.kernels()), "paged_attention", answer_nothing)
    measure_attention(m, (Shape(1, 16), Shape(1, 16, new=2)), with_peers=False)
    assert not m.rows and all(case["wrong"] for case in m.not_timed)
    assert {(case["name"], case["context"]) for case in m.not_timed} == {
        *(("decode", 16), ("append", 16))
    }


def test_each_operation_on_blocks_is_wrong_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Measurement(emulated(), seconds=60)
    monkeypatch.setattr(type(m.machine.kernels()), "gather_blocks", lambda *_: torch.zeros(1))
    measure_copies(m, tiny=True)
    timed = {row["name"] for row in m.rows}
    assert {"copy_blocks", "swap_out", "swap_in"} <= timed and "gather_blocks" not in timed
    assert {c["name"] for c in m.not_timed if c["wrong"]} == {"gather_blocks", "scatter_blocks"}


def test_tables_name_the_machine_and_round_the_figures() -> None:
    rows = [
        decode_row(rate=3800.4),
        decode_row(rate=4200.0, split=1024),
        decode_row(rate=3500.0, us=55.0, kv_dtype="float8_e4m3fn"),
        decode_row("decode/varlen", 3000.0),
        decode_row(batch=32, us=126.2) | {"context": 4096},
        decode_row("append", 12345.6, new=4, context=4100) | {"tflops": 321.4},
        copy_row("swap_in", 54.96),
        {**copy_row("reshape_and_cache", 100.0), "tokens": 256},
    ]
    text = tables(result_of(*rows))
    assert text.startswith("NVIDIA X, torch 2.11.0 with CUDA 13.0, Python 3.12.3, 2026-11-20")
    case = "batch 64 × 8192, heads 32/8 of 128, blocks of 16"
    assert f"| {case} | 100 | 3800 | 95% | 86% | 1.27 (varlen) | 3500 | 1.82 |" in text
    assert "| 4 after 4096 | " in text and "| 12.3 | 321 | - |" in text
    assert "contiguous; the batch is assumed | 135.0 | 126.2 | 1.07 |" in text
    assert "| keys and values are contiguous | 11.7 | - | - |" in text
    assert "| swap_in | 9 blocks of 64 KiB, runs | 55.0 | 100% |" in text
    assert f"| {case} | 1024 | 1.11 |" in text
    assert "- left out, 2 times: decode/x: b: c" in text


def test_a_result_is_saved_under_the_name_of_the_gpu_and_the_day(tmp_path: Path) -> None:
    m = Measurement(emulated(), seconds=1)
    m.add("x", "GB/s", 1.23456789, batch=2)
    path = m.save(tmp_path / "deep")
    assert path.name.startswith("emulated-2") and path.suffix == ".json"
    saved = json.loads(path.read_text())
    assert saved["rows"] == [{"name": "x", "unit": "GB/s", "p50": 1.23457, "batch": 2}]
    assert saved["machine"]["split_tokens"] == 512


def test_rows_are_saved_as_they_come_and_an_interrupted_run_tells_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut_off(m: Measurement, *_: Any) -> None:
        m.add("x", "GB/s", 1.0)
        (saved,) = tmp_path.glob("emulated-*.json")
        assert len(json.loads(saved.read_text())["rows"]) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_all", cut_off)
    assert measure.main(["--out", str(tmp_path)], lambda watch: emulated()) == 0
    said = capsys.readouterr().out
    assert "interrupted" in said and "not measured: decode" in said


def test_a_survey_tells_the_time_of_each_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "SURVEY", (Shape(2, 40, 4, 2, 32), Shape(1, 90, 4, 2, 32, new=40)))
    measure.measure_survey(emulated())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("survey: ")]
    assert len(lines) == 4 and "40 of batch 1 × 90" in lines[2]
    assert all(f"{split}: " in lines[i] for split in shapes.SPLITS for i in (1, 3))


def test_without_a_gpu_the_measurement_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure.main(["--quick"]) == 2
    assert "no GPU" in capsys.readouterr().out


def test_sizes_exclude_each_other() -> None:
    assert measure.arguments_of(["--quick", "--seconds", "5"]).seconds == 5
    with pytest.raises(SystemExit):
        measure.arguments_of(["--quick", "--tiny"])
