"""Decode, prefill and append: our kernels with several splits, and peers. Checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import estimate
from benchmarks.gpu.cases.peers import Make, peers_of
from benchmarks.gpu.cases.problem import MAX_ERROR, Call, Problem
from benchmarks.gpu.cases.shapes import SPLITS, Shape
from benchmarks.gpu.device.machine import DEFAULT_SPLIT
from benchmarks.gpu.measurement import Measurement

MEMORY_SHARE = 0.3  # of free memory, for one problem's pages; the peers need twice as much again
SETUP_S = 0.4  # for each shape: its data and the expected result
PEERS = 4  # that are likely to run
BYTES_OF_A_SECOND = 3e12


def estimated_seconds(shapes: Sequence[Shape], budget_s: float, num_runs: int) -> float:
    """Return about how long ``measure_attention`` takes on an H200."""
    total = 0.0
    for shape in shapes:
        calls = (2 if shape.shared else len(SPLITS) if shape.new == 1 else 1) + PEERS
        one = max(shape.kv_bytes / BYTES_OF_A_SECOND, shape.flops / 3e14)
        total += SETUP_S + calls * max(budget_s, num_runs * one)
    return total


def measure_attention(
    m: Measurement, shapes: Sequence[Shape], *, with_peers: bool = True, all_splits: bool = False
) -> None:
    """Add a row for each shape and split that fits, ``decode`` or ``append``, and for each peer.
    Decode over a shared prefix is ``shared``, or ``shared/alone`` without shared reads. ``us`` of
    our rows excludes the plan, whose time is ``plan_us``: a step makes it once for all layers.

    all_splits: also measure appends with all splits.
    """
    for shape in shapes:
        name, cases = f"attention {shape}", [_case(shape)]
        if not m.has_time_for(name, cases):
            continue
        measure = partial(_measure, m, shape, with_peers, all_splits)
        m.attempt(name, measure, is_ours=True, cases=cases)


def _case(shape: Shape) -> dict[str, Any]:
    name = "shared" if shape.shared else "decode" if shape.new == 1 else "append"
    return {"name": name, **shape.named()}


def _measure(m: Measurement, shape: Shape, with_peers: bool, all_splits: bool) -> None:
    if replace(shape, kv_dtype="bfloat16").kv_bytes > MEMORY_SHARE * m.machine.free_bytes():
        size = f"its pages take {shape.kv_bytes >> 30} GiB"
        m.leave_out(f"attention {shape}", size, [_case(shape)])
        return
    problem = Problem(shape, m.machine.device)
    right = problem.right_rows()
    kind = _case(shape)["name"]
    # With more than one new token, few sequences are split.
    splits = SPLITS if kind == "decode" or all_splits else (DEFAULT_SPLIT,)
    ours = [(kind, split, True) for split in splits]
    if shape.shared:
        ours.append((f"{kind}/alone", DEFAULT_SPLIT, False))
    for name, split, share_reads in ours:
        kernels = m.machine.kernels(split, share_reads=share_reads)
        call = problem.attention(kernels)
        answer = call.run()
        kernels.check_faults()
        if _is_right(m, f"{name} split={split} {shape}", problem, answer, right):
            _time(m, name, shape, call.run, **_about_ours(m, name, shape, call, split))
    if not with_peers:
        return
    for peer, make in peers_of(problem).items():

        def try_peer(peer: str = peer, make: Make = make) -> None:
            call = make()
            error = problem.error(call.rows(call.run()), right)
            if not error <= MAX_ERROR:
                raise ValueError(f"its result has a relative error of {error:.3g}")
            _time(m, f"{kind}/{peer}", shape, call.run)

        m.attempt(f"{kind}/{peer} {shape}", try_peer)


def _is_right(
    m: Measurement, name: str, problem: Problem, answer: torch.Tensor, right: torch.Tensor
) -> bool:
    whole = bool(answer.isfinite().all())
    error = problem.error(answer, right)
    said = f"has a relative error of {error:.3g}, all finite: {whole}"
    return m.is_right(name, whole and error <= MAX_ERROR, said, [_case(problem.shape)])


def _time(m: Measurement, name: str, shape: Shape, run: Callable[[], object], **about: Any) -> None:
    """Time ``run``: decode in GB/s of keys and values, append in tokens/s."""
    seconds = m.machine.watch.seconds(run)
    about_all = {**shape.named(), "us": _in_us(seconds), **about}
    if shape.new == 1:
        m.add(name, "GB/s", shape.kv_bytes / seconds / 1e9, **about_all)
    else:
        tflops = float(f"{shape.flops / seconds / 1e12:.4g}")
        m.add(name, "tokens/s", shape.batch * shape.new / seconds, tflops=tflops, **about_all)


def _about_ours(m: Measurement, name: str, shape: Shape, call: Call, split: int) -> dict[str, Any]:
    """Return the further columns of our rows: other times, and the estimated time where the copy
    bandwidth is known.
    """
    watch, run = m.machine.watch, call.run
    about: dict[str, Any] = {"split": split, "plan_us": _in_us(watch.seconds(call.plan))}
    about["host_us"] = _in_us(watch.host_seconds(run))
    in_kernels = watch.kernel_seconds(run)
    if in_kernels is not None:
        about["kernels_us"] = _in_us(in_kernels)
    copy = m.copy_gb_s
    if copy is None:
        return about
    seconds = estimate.seconds_alone if name.endswith("/alone") else estimate.seconds
    times = seconds(shape, copy * 1e9, m.machine.num_multiprocessors, split)
    about["estimated_us"] = [_in_us(time) for time in times]
    may_share = shape.shared > 0 and not name.endswith("/alone")
    about["estimated_plan_us"] = [_in_us(t) for t in estimate.plan_seconds(shape, may_share)]
    return about


def _in_us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.5g}")
