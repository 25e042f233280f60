"""A run on a GPU misses the targets of wrong cases, and meets none by leaving cases out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu import profile
from benchmarks.gpu.verdict import TARGETS, said, table, verdicts

CASE = {"batch": 16, "context": 4096, "heads": 32, "kv_heads": 8, "head": 128, "block": 16}
BF16 = CASE | {"new": 1, "shared": 0, "kv_dtype": "bfloat16"}
FP8 = BF16 | {"kv_dtype": "float8_e4m3fn"}
BANDWIDTHS = [
    {"case": f"{name} bandwidth", "gb_s": gb_s}
    for name, gb_s in (("copy", 3000.0), ("read", 3000.0), ("link_out", 50.0), ("link_in", 50.0))
]
CSV = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed"
"","","usecond","%"
"0","void kvplane::cuda::attend_short<kvplane::cuda::Half, 128, 1, 3>(Work)","61.5","83.2"
"""


def timed(name: str, us: float, of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"case": name, **of, "us": us, "gb_s": 270_000 / us, "tflops": 1.0, **more}


def mets(*rows: dict[str, Any]) -> dict[str, list[bool | None]]:
    found: dict[str, list[bool | None]] = {}
    for each in verdicts([*BANDWIDTHS, *rows]):
        found.setdefault(each.target, []).append(each.met)
    return found


def test_decode_is_held_to_bandwidth_the_best_peer_and_bf16() -> None:
    ours = timed("decode", 99.0, BF16, split=512)
    assert mets(ours) == {"copy": [True], "peer": [False]}
    assert mets(ours, timed("decode/x", 110.0, BF16), timed("decode/y", 105.0, BF16))["peer"] == [
        True
    ]
    assert mets(ours, timed("decode/x", 100.0, BF16))["peer"] == [False]
    assert mets(ours, timed("decode", 58.0, FP8, split=512))["fp8"] == [True]
    assert mets(ours, timed("decode", 59.0, FP8, split=512))["fp8"] == [False]
    small = BF16 | {"batch": 4}
    assert mets(timed("decode", 1000.0, small, split=512)) == {}


def test_another_split_meets_no_target_and_a_wrong_one_misses_it() -> None:
    other = timed("decode", 50.0, BF16, split=256)
    assert mets(other) == {"copy": [None], "peer": [None]}
    wrong = {"case": "decode", **BF16, "split": 256, "ok": False}
    assert mets(timed("decode", 50.0, BF16, split=512), wrong)["copy"] == [False]
    left_out = {"case": "decode", **BF16, "left_out": "no time left"}
    assert mets(left_out) == {"copy": [None], "peer": [None]}


def test_shared_reads_copies_and_swaps_are_held_to_theirs() -> None:
    shared = BF16 | {"shared": 2048}
    ours = timed("shared", 100.0, shared, split=512)
    assert mets(ours)["shared"] == [None]
    assert mets(ours, timed("shared/alone", 300.0, shared, split=512))["shared"] == [True]
    blocks = {"block_bytes": 1 << 20, "order": "scattered"}
    assert mets(timed("gather_blocks", 99.0, blocks))["copies"] == [True]
    assert mets(timed("swap_in", 5900.0, blocks))["swaps"] == [True]
    assert mets(timed("swap_out", 6100.0, blocks))["swaps"] == [False]


def test_the_summary_counts_what_was_left_out_and_the_table_has_our_rows() -> None:
    rows = [
        *BANDWIDTHS,
        timed("decode", 99.0, BF16, split=512),
        timed("decode", 90.0, BF16, split=1024),
        timed("decode/x", 110.0, BF16),
        {"case": "decode", **BF16, "batch": 64, "left_out": "no time left"},
    ]
    lines = list(said(rows))[-len(TARGETS) :]
    assert lines[0] == f"met so far, 1 left out: {TARGETS['copy']} (1 of 1 cases)"
    assert lines[2] == f"not measured: {TARGETS['fp8']} (0 of 0 cases)"
    assert [line for line in table(rows) if "16 × 4096" in line] == [
        "| decode 16 × 4096, heads 32/8 of 128, blocks of 16 | 99.0 | 2727 | 90.9% | 1 "
        "| 1.11 (decode/x) | 1024: 1.10 × |"
    ]


def test_a_profiled_kernel_gets_a_line_and_the_units_none(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(CSV)
    assert profile.say(path) == ["profile: attend_short<Half, 128, 1, 3>: time 61.5, dram % 83.2"]
    path.write_text("==ERROR== ERR_NVGPUCTRPERM\n")
    assert profile.say(path) == []
