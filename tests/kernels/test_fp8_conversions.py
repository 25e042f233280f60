"""Numbers become fp8 and fp32 again bit for bit as in torch, but too large ones saturate."""

from __future__ import annotations

from collections.abc import Iterator

import oracle
import pytest
import torch
from kernel_cases import FLOATS, FP8, assert_same_bits

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions

kernels = CpuKernels()

pytestmark = pytest.mark.usefixtures("every_cpu_isa")

HEAD_SIZE = 64
NAN_CODE = 0x7F


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).view(dtype)


def finite_codes(dtype: torch.dtype) -> torch.Tensor:
    codes = all_codes(dtype)
    return codes[codes.float().isfinite()]


def stored(
    numbers: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """What pages hold of these numbers, by the kernel; both as keys and as values."""
    count = -(-numbers.numel() // HEAD_SIZE)
    rows = torch.zeros(count * HEAD_SIZE, dtype=numbers.dtype)
    rows[: numbers.numel()] = numbers.flatten()
    rows = rows.view(count, 1, HEAD_SIZE)
    pages = torch.full((count, 2, 1, 1, HEAD_SIZE), torch.nan, dtype=dtype)
    kernels.reshape_and_cache(
        WriteArguments(rows, rows, pages, torch.arange(count), scales, scales)
    )
    assert_same_bits(pages[:, 0], pages[:, 1])
    return pages[:, 0].flatten()[: numbers.numel()]


def loaded(codes: torch.Tensor, query_dtype: torch.dtype) -> torch.Tensor:
    """Values in pages as attention reads them: the only token that a query sees has weight 1."""
    pages = torch.zeros((1, 2, 1, 1, codes.numel()), dtype=codes.dtype)
    pages[0, 1, 0, 0] = codes
    query = torch.zeros((1, 1, codes.numel()), dtype=query_dtype)
    one = torch.ones(1, dtype=torch.int64)
    tables, starts = torch.zeros((1, 1), dtype=torch.int64), torch.tensor([0, 1])
    arguments = AttentionArguments(query, pages, tables, starts, one, AttentionOptions(1.0))
    return kernels.paged_attention(arguments)[0, 0]


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


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_is_the_number_that_it_is_to_torch(dtype: torch.dtype) -> None:
    for query_dtype in FLOATS:
        codes = all_codes(dtype)
        ours, torchs = loaded(codes, query_dtype), codes.float().to(query_dtype)
        assert ours.isnan().equal(torchs.isnan())
        assert ours.nan_to_num(nan=0.0).equal(torchs.nan_to_num(nan=0.0))


@pytest.mark.parametrize("query_dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_is_the_same_number_in_a_key(
    dtype: torch.dtype, query_dtype: torch.dtype
) -> None:
    codes = finite_codes(dtype)[:248]
    pages = torch.zeros((1, 2, 1, 1, 248), dtype=dtype)
    pages[0, 0, 0, 0] = codes
    query = torch.eye(248, dtype=query_dtype)[None].contiguous()
    arguments = AttentionArguments(
        query,
        pages,
        torch.zeros((1, 1), dtype=torch.int64),
        torch.tensor([0, 1]),
        torch.tensor([1]),
        AttentionOptions(scale=1.0),
    )
    lse = torch.full((1, 248), torch.nan)
    kernels.paged_attention(arguments, lse=lse)
    assert lse[0].equal(codes.float())


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_finite_code_survives_the_way_there_and_back(dtype: torch.dtype) -> None:
    codes = finite_codes(dtype)
    for source in FLOATS:
        assert_same_bits(stored(codes.to(source), dtype), codes)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_numbers_around_every_boundary_round_as_torch_rounds(dtype: torch.dtype) -> None:
    numbers = around_every_boundary(dtype)
    assert_same_bits(stored(numbers, dtype), oracle.rounded(numbers, None, dtype))
    assert stored(torch.tensor([torch.inf, 1e9]), dtype).float().eq(torch.finfo(dtype).max).all()


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_numbers_of_all_magnitudes_round_as_torch_rounds(
    dtype: torch.dtype, source: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=rng).int()
    ordinary = torch.randn(1 << 16, generator=rng) * 30
    numbers = torch.cat((bits.view(torch.float32).nan_to_num(nan=0.0), ordinary)).to(source)
    assert_same_bits(stored(numbers, dtype), oracle.rounded(numbers, None, dtype))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_scale_divides_and_is_not_multiplied_by_its_inverse(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(4)
    for scale in (3.0, 0.0123, 7e-5, 1e-40, 3e38):
        scales = torch.tensor([scale])
        # On the way back from a midpoint, the last bit of the quotient decides.
        numbers = torch.cat(
            (around_every_boundary(dtype) * scales, torch.randn(999, generator=rng))
        )
        assert_same_bits(
            stored(numbers, dtype, scales),
            oracle.rounded(numbers.view(-1, 1, 1), scales, dtype).flatten(),
        )


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_nan_of_either_sign_becomes_the_code_0x7f(dtype: torch.dtype) -> None:
    nans = torch.tensor([0x7FC00000, 0xFFC00000 - (1 << 32), 0x7F800001]).int().view(torch.float32)
    for scales in (None, torch.tensor([0.5])):
        assert (stored(nans, dtype, scales).view(torch.uint8) == NAN_CODE).all()


@pytest.fixture
def subnormals_flushed() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("subnormals_flushed")
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_process_that_flushes_subnormals_has_those_of_fp8(dtype: torch.dtype) -> None:
    codes = finite_codes(dtype)
    numbers = stored(codes.float(), dtype)
    out = loaded(codes[:120], torch.float32)
    torch.set_flush_denormal(False)
    assert_same_bits(numbers, codes)
    assert out.equal(codes[:120].float())
