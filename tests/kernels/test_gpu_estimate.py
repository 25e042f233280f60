"""The model of the kernels' time, which stands beside each goal before a GPU has run them."""

from __future__ import annotations

from typing import Any

import pytest
from test_gpu_benchmark import emulated

from benchmarks.gpu import estimate, measure
from benchmarks.gpu.cases import shapes
from benchmarks.gpu.cases.shapes import Shape
from benchmarks.gpu.device.timing import Stopwatch
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.verdict import BANDWIDTH_TARGET, verdicts


def test_an_estimate_stands_beside_each_goal(capsys: pytest.CaptureFixture[str]) -> None:
    estimate.main([])
    lines = capsys.readouterr().out.splitlines()
    held, _ = shapes.by_target(shapes.DECODES)
    assert len(lines) == len(held) + len(shapes.SHARED)
    assert lines[-2].endswith("32768 tokens shared: 6.7 to 6.7 × alone; goal 3.0 × alone")
    assert lines[0].startswith("batch 16 × 4096, heads 32/8 of 128, blocks of 16: ")
    assert lines[0].endswith("of copy; goal 90% of copy") and lines[1].endswith("goal 1.7 × bf16")
    least, most = estimate.share_of_copy(Shape(16, 4096), 4400)
    assert 0.85 < least < most < 0.95 < estimate.share_of_copy(Shape(256, 32768), 4400)[0] < 1


def test_a_run_estimates_by_what_it_measured_of_the_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An H100 copies less in a second than an H200, which the model takes by default."""
    m = Measurement(emulated(), seconds=60)
    measure.say_estimates(m)
    assert "no copy bandwidth was measured" in capsys.readouterr().out
    m.add("copy_bandwidth", "GB/s", 2900.0)
    said = capsys.readouterr().out
    measure.say_estimates(m)
    first, *lines = capsys.readouterr().out.splitlines()
    assert said and first.startswith("estimate: by 2900 GB/s of copies and 1 multiprocessors")
    assert lines == [f"estimate: {line}" for line in estimate.lines(2900.0, 1)]
    assert lines != [f"estimate: {line}" for line in estimate.lines(estimate.H200_COPY_GB_S, 1)]


def test_estimates_come_before_any_attention_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bandwidths(m: Measurement) -> None:
        m.add("copy_bandwidth", "GB/s", 2900.0)

    monkeypatch.setattr(measure, "measure_bandwidths", bandwidths)
    monkeypatch.setattr(measure, "measure_copies", lambda m: None)
    said_before: list[str] = []

    def attention(m: Measurement, shapes: object) -> None:
        said_before.append(capsys.readouterr().out)

    monkeypatch.setattr(measure, "measure_attention", attention)
    measure.measure_all(Measurement(emulated(), 1), Stopwatch(), True, 1)
    assert "estimate: batch" in said_before[0] and "estimate:" not in "".join(said_before[1:])


def test_the_plan_of_a_step_is_no_part_of_a_call() -> None:
    few, many = (estimate.plan_seconds(Shape(batch, 4096), False) for batch in (16, 256))
    assert 1e-6 < few[0] < few[1] < many[1] < 15e-6 and few[0] < many[0]
    shared = estimate.plan_seconds(Shape(16, 4096), True)
    assert shared[0] > few[0] and shared[1] > few[1]
    assert estimate.OVERHEAD_S == (5e-6, 9e-6)


def test_an_estimate_knows_what_few_items_and_products_cost() -> None:
    one_head = Shape(1, 4096, 8, 1)
    fine, alone, coarse = (
        estimate.seconds(one_head, 4.4e12, 132, split)[0] for split in (64, 512, 2048)
    )
    assert fine < alone < coarse
    # One item takes one block as long in any batch that it does not fill: 11 µs, and the overhead.
    for shape in (one_head, Shape(1, 8192)):
        least, most = estimate.seconds(shape, 4.4e12, 132, 512)
        assert 15e-6 < least < 16e-6 and 20e-6 < most < 21e-6
    of_8_bits = estimate.seconds(Shape(1, 8192, kv_dtype="float8_e4m3fn"), 4.4e12, 132, 512)
    assert least - 1e-6 < of_8_bits[0] and most < of_8_bits[1]  # half the bytes, in no less time
    prefill, _ = estimate.seconds(Shape(1, 4096, new=4096), 4.4e12, 132, 512)
    assert prefill > 10 * alone


def test_a_verdict_names_the_estimate() -> None:
    shape = Shape(64, 8192)
    row = {"name": "decode", "split": 512, "p50": 3900.0, "us": 100.0, **shape.named()}
    copy = {"name": "copy_bandwidth", "p50": 4000.0}
    result: dict[str, Any] = {"machine": {"split_tokens": 512}, "not_timed": []}
    result["rows"] = [copy, row | {"estimated_us": [90.0, 125.0]}]
    said = [v.figures for v in verdicts(result) if v.target == BANDWIDTH_TARGET]
    assert said == ["97.5% (estimated 78% to 108%)"]
