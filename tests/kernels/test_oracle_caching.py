"""New keys and values land in their slots, bit for bit, and nowhere else. Numbers become fp8 and
fp32 again as in torch, but too large ones saturate.
"""

from __future__ import annotations

from collections.abc import Iterator

import oracle
import pytest
import torch
from backends import ONE_OF_EACH, DeviceBackend
from kernel_cases import FLOATS, FP8, Case, assert_same_bits, build
from test_oracle_bits import at_an_odd_address

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions

E4M3, _ = FP8
NUM_TOKENS, NUM_HEADS, HEAD_SIZE = 42, 3, 64
NAN_CODE = 0x7F
one_of_each = pytest.mark.parametrize("backend", ONE_OF_EACH, indirect=True)
of_fp8 = pytest.mark.parametrize("dtype", FP8, ids=str)


def new_pages(num_blocks: int, block_size: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_blocks, 2, NUM_HEADS, block_size, head_size), torch.nan, dtype=dtype)


def check(
    kernels: Kernels,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    expected = pages.clone()
    oracle.reshape_and_cache(key, value, expected, slots, key_scales, value_scales)
    kernels.reshape_and_cache(WriteArguments(key, value, pages, slots, key_scales, value_scales))
    assert_same_bits(pages, expected)


@one_of_each
@pytest.mark.parametrize("block_size", (1, 5, 8, 16, 32, 256))
@pytest.mark.parametrize("head_size", (8, 64, 80, 256))
def test_tokens_land_in_their_slots(backend: Kernels, block_size: int, head_size: int) -> None:
    slots = torch.randperm(64 * block_size)[:NUM_TOKENS]
    key, value = torch.randn(2, NUM_TOKENS, NUM_HEADS, head_size).unbind()
    check(backend, key, value, new_pages(64, block_size, head_size, torch.float32), slots)


@one_of_each
@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_conversion_rounds_as_torch_does(
    backend: Kernels, source: torch.dtype, to: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2, 4096, NUM_HEADS, 16), generator=rng).int()
    numbers = bits.view(torch.float32).nan_to_num(nan=0.0)  # Of all magnitudes, subnormals too.
    ordinary = torch.randn(numbers.shape, generator=rng) * 100
    ties = [1 + odd * 2**-bits for bits in (8, 11) for odd in (1, 3)]
    tiny = [0.0, -0.0, 2**-24, 2**-25, 1.5 * 2**-25, 2**-14, 1e-45]
    large = [65504.0, 65519.99, 65520.0, 3e38, torch.inf, -torch.inf]
    edges = torch.tensor(ties + tiny + large)
    numbers.flatten()[: len(edges)] = edges
    for values in (numbers, ordinary):
        key, value = values.to(source).unbind()
        check(backend, key, value, new_pages(512, 8, 16, to), torch.arange(4096))


@one_of_each
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_every_number_of_16_bits_survives_the_way_to_fp32(
    backend: Kernels, dtype: torch.dtype
) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).nan_to_num(nan=1.0)
    numbers = numbers.view(512, 1, 128)
    pages = torch.zeros((512, 2, 1, 1, 128))
    backend.reshape_and_cache(WriteArguments(numbers, numbers, pages, torch.arange(512)))
    assert_same_bits(pages[:, 0, 0], numbers.float())
    back = torch.zeros((512, 2, 1, 1, 128), dtype=dtype)
    wide = WriteArguments(numbers.float(), numbers.float(), back, torch.arange(512))
    backend.reshape_and_cache(wide)
    assert_same_bits(back[:, 1, 0], numbers)


@one_of_each
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_nan_stays_nan(backend: Kernels, dtype: torch.dtype) -> None:
    key = torch.full((1, NUM_HEADS, 8), torch.nan)
    pages = torch.zeros((1, 2, NUM_HEADS, 1, 8), dtype=dtype)
    backend.reshape_and_cache(WriteArguments(key, -key, pages, torch.tensor([0])))
    assert pages.isnan().all()


SLOTS = {
    "negative ones are skipped": [3, -1, 0, -(2**63)],
    "the last of equal ones stays": [5, 5, 5],  # on a device, which may keep any, this has one
    "there are none": [],
}


@one_of_each
@pytest.mark.parametrize("what", SLOTS)
def test_slots_are_taken_as_they_are(backend: Kernels, what: str) -> None:
    slots = torch.tensor(SLOTS[what], dtype=torch.int64)
    if isinstance(backend, DeviceBackend):
        slots = slots.unique()
    key, value = torch.randn(2, len(slots), NUM_HEADS, 8).unbind()
    check(backend, key, value, new_pages(2, 4, 8, torch.float32), slots)


@one_of_each
def test_strided_tensors_are_read_and_written_in_place(backend: Kernels) -> None:
    key, value = torch.randn(NUM_TOKENS, 2, NUM_HEADS, 64).unbind(1)
    slots = torch.randperm(64)[:NUM_TOKENS]
    pool = torch.full((4, 3, 2, NUM_HEADS, 16, 64), torch.nan)
    check(backend, key, value, pool[:, 1], slots)
    assert pool[:, 0].isnan().all() and pool[:, 2].isnan().all()
    tokens_first = torch.full((4, 2, 16, NUM_HEADS, 64), torch.nan).transpose(2, 3)
    check(backend, key, value, tokens_first, slots)
    heads_first = torch.randn(2, NUM_HEADS, NUM_TOKENS, 64).transpose(1, 2)
    slots = slots.repeat_interleave(2)[::2]
    check(backend, heads_first[0], heads_first[1], pool[:, 2], slots)


@one_of_each
@pytest.mark.parametrize("to", FP8, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_each_head_of_fp8_pages_has_scales_of_its_own(
    backend: Kernels, source: torch.dtype, to: torch.dtype
) -> None:
    per_head = torch.tensor([0.01, 3.0, 700.0])
    for scales in (
        (None, None),
        (torch.tensor([0.3]), None),
        (None, per_head),
        (per_head, per_head.flip(0)),
        (torch.tensor([0.3]), per_head.repeat_interleave(3)[::3]),
    ):
        for head_size, block_size in ((8, 1), (72, 5), (256, 16)):
            key, value = torch.randn(2, NUM_TOKENS, NUM_HEADS, head_size).to(source).unbind()
            slots = torch.randperm(64)[:NUM_TOKENS]
            check(backend, key, value, new_pages(64, block_size, head_size, to), slots, *scales)


@one_of_each
def test_fp8_pages_inside_a_pool_are_written_from_strided_keys_on_every_thread(
    backend: Kernels,
) -> None:
    qkv = torch.randn(700, 4, NUM_HEADS, 256)
    pool = torch.full((44, 2, 2, NUM_HEADS, 16, 256), torch.nan).to(E4M3)
    slots = torch.randperm(44 * 16)[:700]
    slots[5::50] = -1
    scales = torch.tensor([0.02]), torch.tensor([0.05])
    check(backend, qkv[:, 1], qkv[:, 3], pool[:, 1], slots, *scales)
    assert pool[:, 0].isnan().all()


@one_of_each
@pytest.mark.parametrize("offset", (1, 2, 4), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_start_anywhere_are_written_as_others(
    backend: Kernels, dtype: torch.dtype, offset: int
) -> None:
    for pages_dtype in (E4M3, torch.float32):
        batch = build(Case(dtype=dtype, pages_dtype=pages_dtype, head_size=24))
        fresh = torch.zeros_like(batch.pages)
        for pages, key in (
            (at_an_odd_address(fresh, offset), batch.key),
            (fresh, at_an_odd_address(batch.key, offset)),
        ):
            pages.fill_(torch.nan)
            backend.reshape_and_cache(WriteArguments(key, batch.value, pages, batch.slots))
            assert_same_bits(pages, batch.pages)


@pytest.mark.parametrize("pages_dtype", (torch.float32, torch.bfloat16, E4M3), ids=str)
def test_one_row_of_latents_is_written_for_each_token_and_no_other_slot(
    cpu: str, pages_dtype: torch.dtype
) -> None:
    case = Case(((1, 5), (1, 20)), (4, 1), 24, value_head_size=16, latent=True)
    batch = build(Case(**vars(case) | {"pages_dtype": pages_dtype}))
    keys, values = batch.pages
    memory = keys.untyped_storage()
    assert memory.nbytes() == keys.numel() * keys.element_size()
    assert values.untyped_storage().data_ptr() == memory.data_ptr()
    rows = keys[:, 0].flatten(0, 1).float()
    assert torch.equal(rows[batch.slots], batch.key[:, 0].to(pages_dtype).float())
    rows[batch.slots] = torch.nan
    assert rows.isnan().all()


def finite_codes(dtype: torch.dtype) -> torch.Tensor:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    return codes[codes.float().isfinite()]


def stored(
    kernels: Kernels, numbers: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """What pages hold of these numbers, by the kernel; both as keys and as values."""
    count = -(-numbers.numel() // HEAD_SIZE)
    rows = torch.zeros(count * HEAD_SIZE, dtype=numbers.dtype)
    rows[: numbers.numel()] = numbers.flatten()
    rows = rows.view(count, 1, HEAD_SIZE)
    pages = torch.full((count, 2, 1, 1, HEAD_SIZE), torch.nan, dtype=dtype)
    slots = torch.arange(count)
    kernels.reshape_and_cache(WriteArguments(rows, rows, pages, slots, scales, scales))
    assert_same_bits(pages[:, 0], pages[:, 1])
    return pages[:, 0].flatten()[: numbers.numel()]


def attended(
    kernels: Kernels, query: torch.Tensor, pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the lse of the only token, [num_heads, head_size], over the only slot."""
    one, lse = torch.ones(1, dtype=torch.int64), torch.full(query.shape[:1], torch.nan)[None]
    tables, starts = torch.zeros((1, 1), dtype=torch.int64), torch.tensor([0, 1])
    arguments = AttentionArguments(query[None], pages, tables, starts, one, AttentionOptions(1.0))
    return kernels.paged_attention(arguments, lse=lse)[0], lse[0]


def loaded(kernels: Kernels, codes: torch.Tensor, query_dtype: torch.dtype) -> torch.Tensor:
    """Values in pages as attention reads them: the only token that a query sees has weight 1."""
    pages = torch.zeros((1, 2, 1, 1, codes.numel()), dtype=codes.dtype)
    pages[0, 1, 0, 0] = codes
    return attended(kernels, torch.zeros((1, codes.numel()), dtype=query_dtype), pages)[0][0]


def around_every_boundary(dtype: torch.dtype) -> torch.Tensor:
    """The finite numbers, the midpoints between neighbours, and what is next to each in fp32."""
    numbers = finite_codes(dtype).double().unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([largest * factor for factor in (1.0625, 1.125, 2.0, 1e30)])
    points = torch.cat((numbers, middles, beyond, -beyond)).float()
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    infinite = torch.tensor([torch.inf, -torch.inf, -0.0])
    return torch.cat((points, points.nextafter(up), points.nextafter(down), infinite))


@of_fp8
def test_every_code_is_the_number_that_it_is_to_torch(backend: Kernels, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    for query_dtype in FLOATS:
        ours, torchs = loaded(backend, codes, query_dtype), codes.float().to(query_dtype)
        assert ours.isnan().equal(torchs.isnan())
        assert ours.nan_to_num(nan=0.0).equal(torchs.nan_to_num(nan=0.0))


@pytest.mark.parametrize("query_dtype", (torch.float32, torch.bfloat16), ids=str)
@of_fp8
def test_every_code_is_the_same_number_in_a_key(
    cpu: str, dtype: torch.dtype, query_dtype: torch.dtype
) -> None:
    codes = finite_codes(dtype)[:248]
    pages = torch.zeros((1, 2, 1, 1, 248), dtype=dtype)
    pages[0, 0, 0, 0] = codes
    _, lse = attended(CpuKernels(), torch.eye(248, dtype=query_dtype), pages)
    assert lse.equal(codes.float())


@of_fp8
def test_every_finite_code_survives_the_way_there_and_back(
    backend: Kernels, dtype: torch.dtype
) -> None:
    codes = finite_codes(dtype)
    for source in FLOATS:
        assert_same_bits(stored(backend, codes.to(source), dtype), codes)


@of_fp8
def test_numbers_around_every_boundary_round_as_torch_rounds(
    backend: Kernels, dtype: torch.dtype
) -> None:
    numbers = around_every_boundary(dtype)
    assert_same_bits(stored(backend, numbers, dtype), oracle.rounded(numbers, None, dtype))
    large = stored(backend, torch.tensor([torch.inf, 1e9]), dtype)
    assert large.float().eq(torch.finfo(dtype).max).all()


@pytest.mark.parametrize("source", FLOATS, ids=str)
@of_fp8
def test_numbers_of_all_magnitudes_round_as_torch_rounds(
    cpu: str, dtype: torch.dtype, source: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=rng).int()
    ordinary = torch.randn(1 << 16, generator=rng) * 30
    numbers = torch.cat((bits.view(torch.float32).nan_to_num(nan=0.0), ordinary)).to(source)
    assert_same_bits(stored(CpuKernels(), numbers, dtype), oracle.rounded(numbers, None, dtype))


@of_fp8
def test_a_scale_divides_and_is_not_multiplied_by_its_inverse(
    backend: Kernels, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(4)
    for scale in (3.0, 0.0123, 7e-5, 1e-40, 3e38):
        scales = torch.tensor([scale])
        # On the way back from a midpoint, the last bit of the quotient decides.
        numbers = torch.cat(
            (around_every_boundary(dtype) * scales, torch.randn(999, generator=rng))
        )
        rounded = oracle.rounded(numbers.view(-1, 1, 1), scales, dtype).flatten()
        assert_same_bits(stored(backend, numbers, dtype, scales), rounded)


@of_fp8
def test_nan_of_either_sign_becomes_the_code_0x7f(backend: Kernels, dtype: torch.dtype) -> None:
    nans = torch.tensor([0x7FC00000, 0xFFC00000 - (1 << 32), 0x7F800001]).int().view(torch.float32)
    for scales in (None, torch.tensor([0.5])):
        assert (stored(backend, nans, dtype, scales).view(torch.uint8) == NAN_CODE).all()


@pytest.fixture
def subnormals_flushed() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("subnormals_flushed")
@of_fp8
def test_a_process_that_flushes_subnormals_has_those_of_fp8(cpu: str, dtype: torch.dtype) -> None:
    codes = finite_codes(dtype)
    numbers = stored(CpuKernels(), codes.float(), dtype)
    out = loaded(CpuKernels(), codes[:120], torch.float32)
    torch.set_flush_denormal(False)
    assert_same_bits(numbers, codes)
    assert out.equal(codes[:120].float())
