"""The same pages and queries give the same bits, whatever else is in the batch, however it lies in
memory, and whoever computes it. What sequences share is read once.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import kvplane_kernels as native
import numpy as np
import pytest
import torch
from backends import ALL, CPUS, DeviceBackend
from emulated_build import ROOT
from emulated_build import build as build_program
from kernel_cases import FLOATS, FP8, Batch, Case, assert_same_bits, build, has_bits_of_its_own

from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.backends.cuda import CudaKernels
from kvplane.errors import InvalidRequestError

BF16, (E4M3, E5M2) = torch.bfloat16, FP8
# The first is more than a split of the CPU, the last but one more than a long split of the device.
LENS = ((1, 520), (40, 40), (5, 130), (0, 9), (1, 16), (33, 280), (2, 300))
OPTIONS = {"window": 600, "alibi": True, "sinks": True, "soft_cap": 9.0}
BASE = Case(lens=LENS, heads=(7, 1), head_size=32)
LATENTS = Case(lens=LENS, heads=(70, 1), head_size=576, value_head_size=512, latent=True)
CASES = {
    **{str(dtype): replace(BASE, dtype=dtype) for dtype in FLOATS},
    "fp16 over e4m3": replace(BASE, dtype=torch.float16, pages_dtype=E4M3, scales="head"),
    "bf16 over e5m2": replace(BASE, dtype=BF16, pages_dtype=E5M2, scales="head", head_size=64),
    "fp32 over e4m3": replace(BASE, pages_dtype=E4M3, scales="head", head_size=72),
    "options": replace(BASE, dtype=BF16, head_size=192, value_head_size=128, **OPTIONS),
    "blocks in a pattern": replace(BASE, dtype=BF16, pattern=(32, 2, 5, 2)),
    "masked blocks": replace(BASE, pattern=(16, 1, 0, 0), masked=True),
    "latents": replace(LATENTS, dtype=BF16),
    "latents in e4m3": replace(LATENTS, dtype=BF16, pages_dtype=E4M3),
    "latents in fp32": replace(LATENTS, heads=(20, 1), head_size=288, value_head_size=256),
}
# On the emulator.
AT_NIGHT = ("torch.float16", "bf16 over e5m2", "fp32 over e4m3", "masked blocks")
PLAIN = [
    name
    for name, case in CASES.items()
    if not (case.latent or case.sinks or case.pattern)  # a pattern asks for blocks of its own
]
Answer = tuple[torch.Tensor, torch.Tensor]


def on_each(cases: Sequence[str]) -> pytest.MarkDecorator:
    pairs = [
        pytest.param(
            name,
            case,
            id=f"{name}-{case}",
            marks=[pytest.mark.nightly] if name == "emulated" and case in AT_NIGHT else [],
        )
        for case in cases
        for name in ALL
        if name in CPUS or not CASES[case].latent
    ]
    return pytest.mark.parametrize(("backend", "case"), pairs, indirect=["backend"])


def assert_same(actual: Answer, expected: Answer) -> None:
    """Assert that the outputs have the same bits, and the lse too."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, theirs)


def rows_of(batch: Batch, answer: Answer, sequences: Sequence[int]) -> Answer:
    starts = batch.query_starts.tolist()
    rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
    return answer[0][rows], answer[1][rows]


@on_each([*CASES])
def test_no_bit_depends_on_the_batch_its_order_or_the_threads(backend: Kernels, case: str) -> None:
    batch = build(CASES[case])
    answer = batch.attend()
    alone = [[s] for s in range(len(LENS))]
    if isinstance(backend, DeviceBackend):
        backend.set_seed(7)
        alone = [[0], [2], [5]]  # a short sequence of one token, one of several, and a long one
    for order in (*alone, [4, 6, 0, 5, 3, 1, 2]):
        assert_same(batch.only(order).attend(num_threads=2), rows_of(batch, answer, order))
    for num_threads in () if isinstance(backend, DeviceBackend) else (2, 7, 0):
        assert_same(batch.attend(num_threads=num_threads), answer)


def test_a_neighbour_that_grows_does_not_matter(backend: Kernels) -> None:
    outs = []
    batch = build(Case(lens=((1, 200), (64, 300)), dtype=BF16))
    for query_len in (1, 2, 9, 10, 17, 64):
        starts = torch.tensor([0, 1, 1 + query_len])
        neighbour = replace(batch, query=batch.query[: 1 + query_len], query_starts=starts)
        outs.append(neighbour.attend()[0][0])
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


@pytest.mark.parametrize(
    "case",
    (
        Case(lens=((150, 150),), heads=(5, 1)),
        Case(lens=((150, 150),), heads=(5, 1), window=20),
        Case(lens=((150, 150),), heads=(5, 1), pattern=(32, 1, 3, 1)),
        *(
            Case(((100, 100),), (5, 1), size, dtype=BF16, pages_dtype=E4M3, scales="head")
            for size in (72, 128)
        ),
    ),
    ids=str,
)
def test_a_prompt_cut_in_chunks_gives_the_bits_of_the_whole(cpu: str, case: Case) -> None:
    batch = build(case)
    whole, num_tokens = batch.attend(), case.lens[0][1]
    for chunk in (1, 2, 7, 64, 100):
        parts = []
        for start in range(0, num_tokens, chunk):
            end = min(start + chunk, num_tokens)
            starts, lens = torch.tensor([0, end - start]), torch.tensor([end])
            query = batch.query[start:end]
            parts.append(replace(batch, query=query, query_starts=starts, context_lens=lens))
        outs, lses = zip(*(part.attend() for part in parts), strict=True)
        assert_same((torch.cat(outs), torch.cat(lses)), whole)


@pytest.mark.parametrize(
    "lens",
    # Few items: all are computed by splits. Many: the last ones.
    (((1, 2000), (1, 511), (1, 513)), ((3, 1100), (70, 1030)), ((1, 1100),) * 9),
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_splits_shared_out_to_threads_give_the_bits_of_one_thread(
    cpu: str, dtype: torch.dtype, lens: tuple[tuple[int, int], ...]
) -> None:
    batch = build(Case(lens=lens, heads=(4, 1), head_size=128, dtype=dtype))
    expected = batch.attend(num_threads=1)
    for num_threads in (2, 5):
        assert_same(batch.attend(num_threads=num_threads), expected)


@pytest.mark.parametrize("block_size", (1, 5, 64))
@on_each(PLAIN)
def test_block_size_and_place_of_blocks_do_not_matter(
    backend: Kernels, case: str, block_size: int
) -> None:
    case_ = replace(CASES[case], lens=((1, 200), (9, 130), (40, 65)), heads=(2, 1))
    batch, there = build(case_), build(replace(case_, block_size=block_size))
    moved = replace(batch, pages=there.pages, block_tables=there.block_tables, slots=there.slots)
    moved.write()
    assert_same(moved.attend(), batch.attend())


@on_each(PLAIN)
def test_strides_do_not_matter(backend: Kernels, case: str) -> None:
    batch = build(replace(CASES[case], lens=((1, 200), (9, 130), (40, 65)), heads=(2, 1)))
    pages, query, tables = batch.pages, batch.query, batch.block_tables
    pool = torch.full((pages.shape[0], 3, *pages.shape[1:]), torch.nan).to(pages.dtype)
    pool[:, 1] = pages
    wide = torch.full((query.shape[0], 3, *query.shape[1:]), torch.nan).to(query.dtype)
    wide[:, 0] = query
    strided = [
        replace(batch, pages=pool[:, 1]),
        replace(batch, pages=pages.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)),
        replace(batch, query=wide.unbind(1)[0]),
        replace(batch, query=query.transpose(0, 1).contiguous().transpose(0, 1)),
        replace(batch, block_tables=tables.repeat(1, 2)[:, : tables.shape[1]]),
        replace(batch, block_tables=tables.int()),
        replace(batch, context_lens=batch.context_lens.repeat_interleave(2)[::2]),
    ]
    if batch.key_scales is not None:
        every_other = batch.key_scales.repeat_interleave(2)[::2]
        strided.append(replace(batch, key_scales=every_other))
    if not isinstance(backend, DeviceBackend):  # which reads rows of no 16 bytes in another way
        strided.append(replace(batch, pages=at_an_odd_address(pages)))
    expected = batch.attend()
    for other in strided:
        assert_same(other.attend(), expected)


def at_an_odd_address(tensor: torch.Tensor, offset: int = 1) -> torch.Tensor:
    room = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
    there = room[offset:].view(tensor.shape)
    there.copy_(tensor)
    return there


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_room_in_the_tables_and_a_known_query_length_do_not_matter(
    device: DeviceBackend, dtype: torch.dtype
) -> None:
    batch = build(Case(lens=((1, 40), (2, 60), (1, 7)), dtype=dtype))
    expected, _ = batch.attend()
    wide = torch.nn.functional.pad(batch.block_tables, (0, 100), value=-1)
    for tables, max_query_len in ((wide, 0), (batch.block_tables, 2), (wide, 2)):
        arguments = replace(batch, block_tables=tables).to_attend()
        out = device.paged_attention(replace(arguments, max_query_len=max_query_len))
        assert_same_bits(out, expected)


@pytest.mark.parametrize("head_size", (8, 72, 128))
@pytest.mark.parametrize(
    "case",
    (
        *(Case(dtype=dtype, alibi=True) for dtype in FLOATS),
        *(Case(dtype=d, pages_dtype=p, scales="head") for d in FLOATS for p in FP8),
        Case(soft_cap=1.5, sinks=True, alibi=True, value_head_size=8),
        Case(heads=(4, 1), value_head_size=8, latent=True),
    ),
    ids=str,
)
def test_sets_give_the_same_bits_but_where_they_fuse_products_and_sums(
    case: Case, head_size: int
) -> None:
    batch = build(replace(case, lens=((1, 600), (20, 70)), head_size=head_size))
    answers, before = {}, native.cpu_isa()
    for isa in native.cpu_isas():
        native.use_cpu_isa(isa)
        answers[isa] = batch.attend()
    native.use_cpu_isa(before)
    expected, pages_dtype = answers["baseline"], case.pages_dtype or case.dtype
    for isa, answer in answers.items():
        if has_bits_of_its_own(isa, case.dtype, pages_dtype, head_size):
            torch.testing.assert_close(answer[1], expected[1], rtol=2e-6, atol=5e-6)
        else:
            assert_same(answer, expected)
    if "avx512bf16" in answers and (case.dtype, pages_dtype, head_size) == (BF16, BF16, 128):
        bits = [out.view(torch.int16).numpy().tobytes() for out, _ in answers.values()]
        assert bits.count(bits[[*answers].index("avx512bf16")]) == 1, "it has products of its own"


@pytest.mark.parametrize("pages_dtype", (*FLOATS, *FP8), ids=str)
@pytest.mark.parametrize(("head_size", "value_head_size"), ((24, 16), (512, 448)))
def test_latents_have_the_bits_of_the_same_keys_and_values(
    cpu: str, head_size: int, value_head_size: int, pages_dtype: torch.dtype
) -> None:
    for dtype in (BF16, torch.float32):
        case = replace(LATENTS, heads=(4, 1), dtype=dtype, pages_dtype=pages_dtype)
        case = replace(case, head_size=head_size, value_head_size=value_head_size)
        batch = build(replace(case, scales="head" if pages_dtype in FP8 else None))
        expanded = build(replace(case, latent=False))
        same = ("query", "key", "value", "key_scales", "value_scales")
        expanded = replace(expanded, **{name: getattr(batch, name) for name in same})
        expanded.write()
        assert_same(batch.attend(), expanded.attend())


def test_numbers_that_fp8_holds_exactly_give_the_bits_of_bf16_pages(cpu: str) -> None:
    for head_size, scale in ((80, 1.0), (128, 1.0), (128, 0.25)):
        batch = build(Case(LENS, (4, 2), head_size, dtype=BF16, pages_dtype=E4M3))
        key, value = (t.to(E4M3).to(BF16) * scale for t in (batch.key, batch.value))
        scales = torch.tensor([scale])
        narrow = replace(batch, key=key, value=value, key_scales=scales, value_scales=scales)
        wide = replace(batch, key=key, value=value, pages=batch.pages.to(BF16))
        narrow.write()
        wide.write()
        assert_same(narrow.attend(), wide.attend())


# Sequences that share blocks. The CPU's splits have 512 tokens, the device's 64.
OF_CPU = ((1, 1100), (3, 1090), (1, 700), (1, 1024), (2, 1500), (1, 100))
OF_DEVICE = ((1, 300), (3, 290), (1, 70), (40, 200), (1, 20), (1, 150), (1, 400))
SHARING = (
    *(Case(heads=(4, 2), head_size=16, dtype=dtype) for dtype in FLOATS),
    Case(heads=(10, 1), head_size=16, dtype=torch.float16),
    Case(heads=(10, 1), head_size=64, dtype=BF16, pages_dtype=E4M3, scales="head"),
    Case(heads=(16, 1), head_size=128, dtype=BF16, pages_dtype=E5M2, scales="head"),
    Case(heads=(20, 1), head_size=16, dtype=BF16),  # too many rows for two sequences in a tile
    Case(heads=(4, 1), head_size=192, dtype=BF16),  # tiles of 16 rows on a device
    Case(heads=(4, 1), head_size=256, dtype=BF16),  # no tiles that are shared
    Case(heads=(4, 2), head_size=16, dtype=BF16, **OPTIONS),
    Case(heads=(4, 2), head_size=16, dtype=BF16, **OPTIONS | {"window": 90}),
    Case(heads=(4, 2), head_size=16, dtype=BF16, pattern=(64, 2, 3, 1)),
    Case(heads=(4, 2), head_size=16, dtype=BF16, pattern=(16, 1, 0, 0), masked=True),
)


def sharing(case: Case, num_shared_blocks: int) -> Batch:
    """The case's batch, with the first sequence's first blocks in all block tables. Blocks that no
    sequence has any more hold NaN.
    """
    batch = build(case)
    tables = batch.block_tables.clone()
    used = -(-batch.context_lens // case.block_size)
    for s in range(1, len(tables)):
        num = min(num_shared_blocks, int(used[s]))
        tables[s, :num] = tables[0, :num]
    left = torch.ones(len(batch.pages), dtype=torch.bool)
    left[tables[tables >= 0].long()] = False
    batch.pages.view(torch.uint8)[left] = 0xFF  # a NaN of every type
    return replace(batch, block_tables=tables)


def apart(backend: Kernels, batch: Batch) -> Answer:
    """Attention that reads what is shared for each sequence."""
    lse = torch.full(batch.query.shape[:2], torch.nan)
    if not isinstance(backend, DeviceBackend):
        alone: Kernels = CpuKernels(1, share_reads=False)
        return alone.paged_attention(batch.to_attend(), lse=lse), lse
    other = DeviceBackend(backend.native, backend.torch_device.type)
    other.kernels = CudaKernels(
        backend.native, backend.torch_device, split_tokens=64, share_reads=False
    )
    return other.paged_attention(batch.to_attend(), lse=lse), lse


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(
            name,
            case,
            id=f"{name}-{case}",
            # Every second one is emulated at night only.
            marks=[pytest.mark.nightly] if name == "emulated" and i % 2 else [],
        )
        for i, case in enumerate(SHARING)
        for name in ALL
    ],
    indirect=["backend"],
)
def test_sharing_threads_and_the_batch_change_no_bit(backend: Kernels, case: Case) -> None:
    is_device = isinstance(backend, DeviceBackend)
    batch = sharing(replace(case, lens=OF_DEVICE if is_device else OF_CPU), 12 if is_device else 68)
    answer = batch.attend()
    assert not answer[0].isnan().any()
    assert_same(answer, apart(backend, batch))
    for num_threads in () if is_device else (2, 5):
        assert_same(batch.attend(num_threads=num_threads), answer)
    for order in ([1, 3, 4, 0],) if is_device else ([4], [5, 2, 0], [1, 3, 4, 0]):
        part = batch.only(order).attend(num_threads=2)
        assert_same(part, rows_of(batch, answer, order))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))]
)
def test_random_tables_that_share_give_the_bits_of_each_alone(
    device: DeviceBackend, seed: int
) -> None:
    """Several families, their members in any order, which share more or less with the first."""
    rng = random.Random(seed)
    num = rng.randrange(2, 45)
    lens = tuple((1, rng.randrange(1, 300)) for _ in range(num))
    heads = rng.choice(((4, 2), (3, 3), (7, 1)))
    case = Case(lens=lens, heads=heads, head_size=16, dtype=BF16, block_size=rng.choice((8, 5)))
    batch = build(replace(case, seed=seed))
    tables = batch.block_tables.clone()
    used = (-(-batch.context_lens // case.block_size)).tolist()
    for s in range(num):
        other = rng.randrange(num)
        full = lens[other][1] // case.block_size  # its last block may hold NaN
        count = min(used[s], full, rng.choice((0, 5, 20, 60)))
        tables[s, :count] = tables[other, :count]
    batch = replace(batch, block_tables=tables.int())
    answer = batch.attend()
    assert not answer[0].isnan().any()
    assert_same(answer, apart(device, batch))


@pytest.mark.nightly  # builds the kernels once more
def test_tiles_that_sequences_share_are_read_once() -> None:
    """shared_reads.cpp counts the reads of the CPU's kernels."""
    if not CPUS:
        return  # A machine with a GPU may have no compiler.
    csrc, cpu = ROOT / "csrc", ROOT / "csrc" / "cpu"
    sources = (
        Path(__file__).with_name("shared_reads.cpp"),
        *(cpu / name for name in ("paged_attention.cpp", "thread_pool.cpp")),
        cpu / "row_ops" / "row_ops_baseline.cpp",
    )
    flags, folders = ("-O1", "-ffp-contract=off", "-Wno-psabi"), (cpu / "row_ops",)
    program = build_program(csrc, sources, flags=flags, link_flags=("-pthread",), folders=folders)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_shared_is_read_once_for_as_many_sequences_as_a_tile_has(
    device: DeviceBackend,
) -> None:
    if device.torch_device.type == "cuda":
        return  # Only the emulator counts bytes.

    def num_bytes(num: int, kernels: CudaKernels, *, tables_may_share: bool = True) -> int:
        case = Case(lens=((1, 1025),) * num, heads=(4, 1), head_size=64, dtype=BF16)
        batch = sharing(case, 64)
        before = device.native.num_copied_bytes()
        kernels.paged_attention(batch.with_lengths(tables_may_share=tables_may_share))
        return int(device.native.num_copied_bytes() - before)

    alone = CudaKernels(device.native, device.torch_device, split_tokens=64, share_reads=False)
    of_token = 2 * 64 * 2
    assert num_bytes(8, alone) == 8 * 1025 * of_token
    assert num_bytes(8, device.kernels) == (1024 + 8) * of_token
    assert num_bytes(9, device.kernels) == (2 * 1024 + 9) * of_token
    assert num_bytes(8, device.kernels, tables_may_share=False) == 8 * 1025 * of_token


def test_a_bad_entry_that_sequences_share_is_reported(device: DeviceBackend) -> None:
    batch = sharing(Case(lens=((1, 200), (1, 180)), heads=(4, 2), head_size=16, dtype=BF16), 11)
    tables = batch.block_tables.clone()
    tables[:, 2] = 10**6
    with pytest.raises(InvalidRequestError) as caught:
        replace(batch, block_tables=tables).attend()
    assert caught.value.field == "block_tables"


def test_a_sequence_without_room_is_reported_and_the_others_share(device: DeviceBackend) -> None:
    batch = sharing(Case(lens=((1, 200),) * 3, heads=(4, 2), head_size=16, dtype=BF16), 11)
    arguments, kernels = device._all_there(batch.to_attend()), device.kernels
    known = device._all_there(batch.with_lengths(tables_may_share=True))
    room = int(kernels.count_partials(known)[:2].sum())
    num_bytes = kernels.attention_workspace_bytes(arguments, room)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    out = kernels.paged_attention(arguments, workspace=workspace)
    with pytest.raises(InvalidRequestError) as caught:
        device.check_faults()
    assert caught.value.field == "workspace"
    assert_same_bits(out.cpu()[:2], device.paged_attention(batch.to_attend())[:2])
    assert np.isfinite(out[:2].float().cpu().numpy()).all()
