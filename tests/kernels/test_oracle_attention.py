"""Attention gives what float64 gives: on every backend, of every pair of types, for every kind of
batch.

On push a kind runs with one pair of types, each kind with the next pair; at night with all of them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from backends import ALL, CPUS, DeviceBackend
from kernel_cases import FLOATS, FP8, Case, assert_as_exact_as_8_bits, assert_as_exact_as_torch

from data_plane.kernels.backend import Kernels

EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513)
BLOCK_SIZES = (1, 5, 8, 16, 32, 64, 128, 256)
HEADS = ((32, 8), (40, 40), (64, 8), (28, 4), (9, 3), (5, 1), (6, 1), (16, 1), (71, 1), (1, 1))
HEAD_SIZES = (8, 32, 56, 64, 72, 80, 96, 112, 120, 128, 192, 256)
TWO_SIZES = ((16, 8), (72, 56), (128, 64), (192, 128), (256, 8), (512, 512), (320, 256), (512, 264))
WINDOWS = ((0, True), (1, False), (7, False), (31, True), (64, False), (256, True))
MIXED = (
    ((1, 523), (5, 18), (129, 463)),
    ((1, 523), (1, 37), (1, 1328)),
    ((0, 0), (7, 7), (0, 50), (1, 1), (64, 65), (3, 100)),
)
LENS = ((1, 600), (9, 35), (3, 40), (0, 0), (40, 45))
LATENT_SIZES = ((24, 16), (40, 24), (288, 256), (72, 72), (576, 8))
# Block tokens, local blocks, vertical stride, head sliding step.
PATTERNS = (
    *((16, 1, stride, step) for stride, step in ((0, 0), (2, 0), (5, 2), (3, -1))),
    *((32, 2, 4, 1), (48, 3, 3, -2), (64, 1, 8, 1), (64, 16, 8, 1), (256, 1, 2, -3)),
)
SCALES: Final[Sequence[Any]] = ("head", "tensor", None)  # of fp8 pages
LONG = Case(lens=LENS, heads=(2, 1))
SPARSE = Case(lens=((1, 700), (90, 430), (3, 40), (0, 0), (1, 63), (150, 150)), heads=(6, 3))
LATENT = Case(lens=LENS, heads=(4, 1), head_size=24, value_head_size=16, latent=True)
HALVES, (E4M3, E5M2) = FLOATS[1:], FP8
# Of queries and pages. Those of the tensor cores come first, and the same halves twice.
TYPES = (
    *zip(HALVES, HALVES, strict=True),
    *itertools.product(reversed(HALVES), FP8),
    *((dtype, dtype) for dtype in FLOATS),
    *((torch.float32, dtype) for dtype in (*FP8, *HALVES)),
    *((dtype, torch.float32) for dtype in HALVES),
    *zip(HALVES, reversed(HALVES), strict=True),
)


def _kinds() -> Iterator[tuple[str, Case]]:
    decodes = ((0, 0), *((1, n) for n in EDGES))
    for size in BLOCK_SIZES:
        lens = decodes if size > 1 else decodes[:11]  # emulated, blocks of one token take long
        yield f"blocks of {size}", Case(lens=lens, block_size=size, head_size=32, heads=(2, 1))
    prefills = tuple((n, n) for n in EDGES[:13])
    yield "prefills", Case(lens=prefills, head_size=32, heads=(1, 1))
    for query_len in (2, 16, 17, 33, 70):
        lens = tuple((query_len, query_len + prefix) for prefix in (0, 1, 15, 16, 100, 129))
        yield f"appends of {query_len}", Case(lens=lens, heads=(2, 1))
    for heads in HEADS:
        yield f"heads {heads}", Case(heads=heads, lens=((1, 70), (9, 35)))
    for size in HEAD_SIZES:
        case = Case(head_size=size, lens=((1, 70), (20, 40)), heads=(3, 1))
        yield f"heads of {size}", case
    for size, num_heads in itertools.product((64, 128, 192, 256), (9, 16)):
        case = Case(head_size=size, lens=((1, 70), (1, 5)), heads=(num_heads, 1))
        yield f"{num_heads} wide heads of {size}", case
    windowed = ((1, 300), (40, 100), (33, 33), (1, 64), (1, 5))
    for window, alibi in WINDOWS:
        case = Case(lens=windowed, window=window, alibi=alibi, heads=(3, 1))
        yield f"window {window}, alibi {alibi}", case
    for lens in MIXED:
        yield f"mix {lens}", Case(lens=lens, head_size=32, table_dtype=torch.int32, heads=(2, 1))
    for window in (0, 300):  # a device cuts long sequences in splits, too
        lens = ((40, 700), (1, 80), (70, 520), (33, 33))
        case = Case(lens=lens, heads=(2, 1), head_size=32, window=window)
        yield f"long splits, window {window}", case
    for soft_cap in (0.3, 2.0, 50.0):
        yield f"cap {soft_cap}", replace(LONG, soft_cap=soft_cap)
    yield "sinks", replace(LONG, heads=(6, 2), sinks=True)
    for size, of_value in TWO_SIZES:
        case = Case(lens=((1, 70), (9, 35), (5, 270)), heads=(6, 2), head_size=size)
        yield f"heads of {size} and {of_value}", replace(case, value_head_size=of_value)
    for heads in ((1, 1), (3, 1), (16, 2), (71, 1)):
        case = replace(LONG, heads=heads, window=31, alibi=True, soft_cap=4.0, sinks=True)
        yield f"options of heads {heads}", replace(case, head_size=96, value_head_size=40)
    deepseek = replace(
        LATENT, lens=((1, 600), (3, 35)), heads=(128, 1), head_size=576, value_head_size=512
    )
    yield "latents of deepseek", deepseek
    for size, of_value in LATENT_SIZES:
        for num_heads in (1, 3, 16):
            case = replace(LATENT, lens=((1, 70), (9, 35)), heads=(num_heads, 1))
            case = replace(case, head_size=size, value_head_size=of_value)
            yield f"{num_heads} latents of {size} and {of_value}", case
    case = replace(LATENT, window=31, alibi=True, soft_cap=4.0, sinks=True, heads=(6, 1))
    yield "latents with options", case
    for num in (31, 32, 33, 70, 1100):
        yield f"{num} sequences", _of_many(num)
    for pattern in PATTERNS:
        yield f"blocks in pattern {pattern}", replace(SPARSE, pattern=pattern)
    case = replace(SPARSE, pattern=(32, 1, 3, 1), window=150, alibi=True, sinks=True, soft_cap=4.0)
    yield "blocks in a pattern with options", case
    yield "blocks in a pattern, latent", replace(LATENT, lens=SPARSE.lens, pattern=(16, 2, 3, 1))
    for block_tokens, local_blocks in ((16, 1), (32, 2), (48, 1), (64, 3)):
        case = replace(SPARSE, pattern=(block_tokens, local_blocks, 0, 0), masked=True)
        yield f"masked blocks of {block_tokens}", case


def _of_many(num_sequences: int) -> Case:
    """Most of the many have no query tokens: these are quick, and still in a device's plan."""
    rng = random.Random(num_sequences)
    busy = [rng.random() < 40 / num_sequences for _ in range(num_sequences)]
    contexts = [rng.choice((1, 5, 70)) for _ in range(num_sequences)]
    lens = [(min(c, rng.choice((1, 1, 40))) * b, c) for b, c in zip(busy, contexts, strict=True)]
    return Case(lens=tuple(lens), heads=(1, 1), head_size=8)


KINDS: Final = dict(_kinds())


def on_each(kinds: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize by backend and kind, of which two of three are emulated at night only. A GPU has
    no kernels of latents.
    """
    pairs = [
        pytest.param(
            name,
            kind,
            id=f"{name}-{kind}",
            marks=[pytest.mark.nightly] if name == "emulated" and i % 3 else [],
        )
        for i, kind in enumerate(kinds)
        for name in (CPUS if KINDS[kind].latent else ALL)
    ]
    return pytest.mark.parametrize(("backend", "kind"), pairs, indirect=["backend"])


def typed(case: Case, types: tuple[torch.dtype, torch.dtype], scales: Any = None) -> Case:
    dtype, pages_dtype = types
    is_scaled = pages_dtype in FP8
    return replace(case, dtype=dtype, pages_dtype=pages_dtype, scales=scales if is_scaled else None)


@on_each([*KINDS])
def test_a_kind_of_batch_is_right(backend: Kernels, kind: str) -> None:
    rounds, place = divmod([*KINDS].index(kind), len(TYPES))
    assert_as_exact_as_torch(typed(KINDS[kind], TYPES[place], SCALES[rounds % 3]))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@on_each([*KINDS])
def test_a_kind_of_batch_is_right_with_all_types(backend: Kernels, kind: str) -> None:
    for i, types in enumerate(TYPES):
        assert_as_exact_as_torch(typed(KINDS[kind], types, SCALES[i % 2]))


@pytest.mark.parametrize(
    ("dtype", "pages_dtype", "scales"),
    [
        (dtype, pages_dtype, scales)
        for dtype, pages_dtype in dict.fromkeys(TYPES)
        for scales in (SCALES if pages_dtype in FP8 else (None,))
    ],
    ids=str,
)
def test_a_pair_of_types_is_right_with_any_scales(
    backend: Kernels, dtype: torch.dtype, pages_dtype: torch.dtype, scales: Any
) -> None:
    """Numbers that were rounded to 8 bits are as far off as torch's are."""
    case = Case(lens=((1, 100), (36, 50)), heads=(6, 3), head_size=32)
    case = typed(case, (dtype, pages_dtype), scales)
    assert_as_exact_as_torch(case)
    if pages_dtype in FP8:
        assert_as_exact_as_8_bits(case)


def random_case(seed: int, longest: int) -> Case:
    rng = random.Random(seed)
    num_kv_heads, head_size = rng.choice((1, 2, 3)), 8 * rng.randint(1, 64)
    contexts = [rng.choice((rng.randint(1, longest), rng.choice(EDGES[:13]))) for _ in range(5)]
    pages_dtype = rng.choice((None, *FLOATS, *FP8))
    return Case(
        lens=tuple((rng.choice((0, 1, 1, min(c, rng.randint(1, 200)), c)), c) for c in contexts),
        heads=(num_kv_heads * rng.randint(1, 8), num_kv_heads),
        head_size=head_size,
        value_head_size=rng.choice((0, 0, 8 * rng.randint(1, head_size // 8))),
        block_size=rng.choice(BLOCK_SIZES),
        dtype=rng.choice(FLOATS),
        pages_dtype=pages_dtype,
        scales=rng.choice(SCALES) if pages_dtype in FP8 else None,
        window=rng.choice((0, 0, 1, 30, 64, 256)),
        alibi=rng.random() < 0.3,
        table_dtype=rng.choice((torch.int32, torch.int64)),
        soft_cap=rng.choice((0.0, 0.0, 0.5, math.pi, 30.0)),
        sinks=rng.random() < 0.3,
        seed=seed,
    )


@pytest.mark.parametrize("case", [random_case(seed, 150) for seed in range(6)], ids=str)
def test_random_batches_are_right(backend: Kernels, case: Case) -> None:
    if isinstance(backend, DeviceBackend):
        backend.set_seed(case.seed)
    assert_as_exact_as_torch(case)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [random_case(seed, 500) for seed in range(100, 300)], ids=str)
def test_many_random_batches_are_right(backend: Kernels, case: Case) -> None:
    test_random_batches_are_right(backend, case)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_long_ragged_mixes_are_right(cpu: str, head_size: int, dtype: torch.dtype) -> None:
    lens = ((992, 2456), (1, 1234), (98, 1145), (1, 4162), (1345, 1345))
    assert_as_exact_as_torch(Case(lens=lens, head_size=head_size, dtype=dtype))
