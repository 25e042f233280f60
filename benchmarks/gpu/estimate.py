"""Estimates by a model of their time what the kernels should reach on hardware.

    python -m benchmarks.gpu.estimate [--copy-gb-s 4400] [--multiprocessors 132]

A call reads each key and value once at the copy bandwidth. It takes another 5 to 9 µs, more over
8-bit pages and for heads of 64 and 256, for launches, for combining splits, and for the rings of
tiles, which fill and drain once in each block. The plan is excluded: a step makes one for all of
its layers, in 2 to 4 µs, more for many sequences. A block alone reads 22 to 25 GB/s, of 8 bits 14
to 16, because finding rows and starting copies takes its warps longer than memory does: an item of
512 tokens takes 11 µs, and a batch of few items no less. Products run at 200 to 280 TFLOP/s. A
prefix that decodes share is read once for each 32 rows of a KV head; as many partial results are
written and read as without sharing. Prints the estimate of each case that has a target, beside its
goal: for an H200, unless other figures are given. benchmarks.gpu.measure prints them for its
device, by that device's copy bandwidth, before it measures any attention. If hardware shows other
times, the model and the claims of docs/cuda.md about speed are wrong.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.gpu.cases import shapes
from benchmarks.gpu.cases.shapes import Shape
from benchmarks.gpu.verdict import OF_COPY, OVER_ALONE, OVER_BF16, case_of

OVERHEAD_S: Final = (5e-6, 9e-6)
OVERHEAD_OF_8_BITS_S: Final = (7e-6, 13e-6)  # more instructions for a byte
OVERHEAD_OF_WIDE_HEADS_S: Final = (8e-6, 22e-6)  # 256: few stages, one block at once
OVERHEAD_OF_NARROW_ROWS_S: Final = (8e-6, 15e-6)  # 64: as many instructions for half the bytes
PLAN_S: Final = (1.5e-6, 3e-6)  # one warp, and its launch
PLAN_OF_32_SEQUENCES_S: Final = (0.4e-6, 0.8e-6)
FAMILIES_S: Final = (2e-6, 6e-6)  # comparing tables, where some may begin with the same blocks
SEQUENCES_OF_WARP: Final = 32
# Of a block alone, which has four warps, at 1.755 to 1.98 GHz. Derived, not measured: by machine
# code for sm_90, its stall counts and what each load and copy waits for, a warp takes 2,650 cycles
# for a tile of 16 tokens of heads of 128, which is 8 KiB; 1,790 of them find rows and start copies.
# Of 8 bits it takes 2,000 for 4 KiB. Memory alone, with 64 KiB in flight for 0.8 µs, would give 80.
BLOCK_BYTES_PER_S: Final = (25e9, 22e9)
BLOCK_BYTES_PER_S_OF_8_BITS: Final = (16e9, 14e9)
FLOPS_PER_S: Final = (280e12, 200e12)
SHORT_ROWS: Final = 32
FAMILY_ROWS: Final = 32
BLOCKS_OF_MULTIPROCESSOR: Final = 2
BLOCKS_OF_8_BITS: Final = 3  # their rings are smaller
H200_COPY_GB_S: Final = 4400.0
H200_MULTIPROCESSORS: Final = 132

Range = tuple[float, float]


def seconds(
    shape: Shape, copy_bytes_per_s: float, num_multiprocessors: int, split_tokens: int
) -> Range:
    """Return the least and the most time that the model gives a call."""
    if shape.shared:
        return _seconds_shared(shape, copy_bytes_per_s, split_tokens)
    reads = shape.kv_bytes / copy_bytes_per_s
    rows = shape.new * (shape.heads // shape.kv_heads)
    if rows > SHORT_ROWS and shape.new > 1:
        least, most = (max(reads, shape.flops / rate) for rate in FLOPS_PER_S)
        return least + OVERHEAD_S[0], most + OVERHEAD_S[1]
    rates, blocks = BLOCK_BYTES_PER_S, BLOCKS_OF_MULTIPROCESSOR
    if shape.kv_dtype != "bfloat16" and shape.head <= 128:
        rates, blocks = BLOCK_BYTES_PER_S_OF_8_BITS, BLOCKS_OF_8_BITS
    num_items = shape.batch * shape.kv_heads * math.ceil(shape.context / split_tokens)
    waves = math.ceil(num_items / (blocks * num_multiprocessors))
    least, most = (max(reads, waves * shape.kv_bytes / num_items / rate) for rate in rates)
    overhead = OVERHEAD_S
    if shape.head > 192:
        overhead = OVERHEAD_OF_WIDE_HEADS_S
    elif shape.head <= 64:
        overhead = OVERHEAD_OF_NARROW_ROWS_S
    elif shape.kv_dtype != "bfloat16":
        overhead = OVERHEAD_OF_8_BITS_S
    return least + overhead[0], most + overhead[1]


def _seconds_shared(shape: Shape, copy_bytes_per_s: float, split_tokens: int) -> Range:
    """Return the times of decodes that share a prefix of whole splits."""
    num_tiles = math.ceil(shape.batch / (FAMILY_ROWS // (shape.heads // shape.kv_heads)))
    own = shape.batch * (shape.context - shape.shared)
    num_splits = math.ceil(shape.context / split_tokens)
    partials = num_splits * shape.batch * shape.heads * (shape.head + 2) * 4
    num_bytes = shape.token_bytes * (num_tiles * shape.shared + own) + 2 * partials
    reads = num_bytes / copy_bytes_per_s
    least, most = (max(reads, shape.flops / rate) for rate in FLOPS_PER_S)
    return least + OVERHEAD_S[0], most + OVERHEAD_S[1]


def plan_seconds(shape: Shape, may_share: bool) -> Range:
    """Return the times of a step's plan, which ``seconds`` excludes."""
    steps = math.ceil(shape.batch / SEQUENCES_OF_WARP)
    parts = zip(PLAN_S, PLAN_OF_32_SEQUENCES_S, FAMILIES_S, strict=True)
    least, most = (own + steps * more + may_share * kin for own, more, kin in parts)
    return least, most


def seconds_alone(
    shape: Shape, copy_bytes_per_s: float, num_multiprocessors: int, split_tokens: int
) -> Range:
    """Return the times where each decode reads the shared blocks for itself."""
    alone = replace(shape, shared=0)
    return seconds(alone, copy_bytes_per_s, num_multiprocessors, split_tokens)


def times_alone(shape: Shape, copy_gb_s: float, num_multiprocessors: int) -> Range:
    """Return how many times faster a shared prefix makes decode, least and most."""
    machine = copy_gb_s * 1e9, num_multiprocessors, 512
    pairs = zip(seconds_alone(shape, *machine), seconds(shape, *machine), strict=True)
    low, high = sorted(alone / shared for alone, shared in pairs)
    return low, high


def share_of_copy(
    shape: Shape,
    copy_gb_s: float,
    num_multiprocessors: int = H200_MULTIPROCESSORS,
    split_tokens: int = 512,
) -> Range:
    """Return the least and the most share of the copy bandwidth that reads of KV reach."""
    least, most = seconds(shape, copy_gb_s * 1e9, num_multiprocessors, split_tokens)
    reads = shape.kv_bytes / (copy_gb_s * 1e9)
    return reads / most, reads / least


def say(shape: Shape, copy_gb_s: float, num_multiprocessors: int) -> str:
    """Return a line for a case: the estimate, and the goal."""
    least, most = share_of_copy(shape, copy_gb_s, num_multiprocessors)
    if shape.shared:
        low, high = times_alone(shape, copy_gb_s, num_multiprocessors)
        goal, reached = f"{OVER_ALONE} × alone", f"{low:.1f} to {high:.1f} × alone"
    elif shape.kv_dtype == "bfloat16":
        goal, reached = f"{OF_COPY:.0%} of copy", f"{least:.0%} to {most:.0%} of copy"
    else:
        low, high = times_bf16(shape, copy_gb_s, num_multiprocessors)
        goal, reached = f"{OVER_BF16} × bf16", f"{low:.2f} to {high:.2f} × bf16"
    return f"{case_of(shape.named())}: {reached}; goal {goal}"


def times_bf16(shape: Shape, copy_gb_s: float, num_multiprocessors: int) -> Range:
    """Return how many times faster fp8 is than bf16, least and most."""
    bytes_per_s = copy_gb_s * 1e9
    of_fp8 = seconds(shape, bytes_per_s, num_multiprocessors, 512)
    of_bf16 = seconds(shapes.in_bf16(shape), bytes_per_s, num_multiprocessors, 512)
    low, high = sorted(b / f for b, f in zip(of_bf16, of_fp8, strict=True))
    return low, high


def lines(copy_gb_s: float, num_multiprocessors: int) -> list[str]:
    """Return a line for each case that has a target."""
    held, _ = shapes.by_target(shapes.DECODES)
    return [say(shape, copy_gb_s, num_multiprocessors) for shape in (*held, *shapes.SHARED)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.estimate")
    parser.add_argument("--copy-gb-s", type=float, default=H200_COPY_GB_S)
    parser.add_argument("--multiprocessors", type=int, default=H200_MULTIPROCESSORS)
    arguments = parser.parse_args(words)
    print("\n".join(lines(arguments.copy_gb_s, arguments.multiprocessors)))


if __name__ == "__main__":
    main()
