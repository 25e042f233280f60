"""Pages of latents, one row for each token, on every instruction set: all query heads share it, and
a value is the first elements of its key.
"""

from __future__ import annotations

from dataclasses import replace

import kvplane_kernels as native
import pytest
import torch
from device_backends import chosen_backend, in_place_of_the_cpu
from kernel_cases import (
    FLOATS,
    FP8,
    Batch,
    Case,
    assert_as_exact_as_torch,
    assert_same_bits,
    build,
)

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("every_cpu_isa")

LENS = ((1, 600), (9, 35), (3, 40), (0, 0), (1, 1))
SMALL = Case(lens=LENS, heads=(4, 1), head_size=24, value_head_size=16, latent=True)
DEEPSEEK = replace(SMALL, heads=(128, 1), head_size=576, value_head_size=512)


def as_keys_and_values(batch: Batch, case: Case) -> Batch:
    """The same numbers in pages that store values too."""
    expanded = build(replace(case, latent=False))
    same = {name: getattr(batch, name) for name in ("query", "key", "value", "sinks")}
    scales = {"key_scales": batch.key_scales, "value_scales": batch.value_scales}
    expanded = replace(expanded, **same, **scales)
    expanded.write()
    return expanded


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_deepseeks_latents_are_right(dtype: torch.dtype) -> None:
    assert_as_exact_as_torch(replace(DEEPSEEK, dtype=dtype))


@pytest.mark.parametrize(
    ("head_size", "value_head_size"), ((24, 16), (40, 24), (288, 256), (72, 72), (576, 8))
)
@pytest.mark.parametrize("num_heads", (1, 3, 16))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_latents_are_right(
    dtype: torch.dtype, num_heads: int, head_size: int, value_head_size: int
) -> None:
    sizes = {"head_size": head_size, "value_head_size": value_head_size}
    assert_as_exact_as_torch(
        replace(SMALL, lens=((1, 70), (9, 35)), heads=(num_heads, 1), dtype=dtype, **sizes)
    )


@pytest.mark.parametrize("scales", (None, "tensor"))
@pytest.mark.parametrize("pages_dtype", FP8, ids=str)
@pytest.mark.parametrize("num_heads", (2, 24))
def test_they_are_right_in_8_bits(num_heads: int, pages_dtype: torch.dtype, scales: None) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        kind = {"dtype": dtype, "pages_dtype": pages_dtype, "scales": scales}
        for case in (SMALL, replace(DEEPSEEK, lens=LENS[1:])):
            assert_as_exact_as_torch(replace(case, heads=(num_heads, 1), **kind))


@pytest.mark.parametrize("pages_dtype", (*FLOATS, *FP8), ids=str)
@pytest.mark.parametrize("case", (SMALL, replace(SMALL, head_size=512, value_head_size=448)))
def test_they_have_the_bits_of_the_same_keys_and_values(
    case: Case, pages_dtype: torch.dtype
) -> None:
    scales = "head" if pages_dtype in FP8 else None
    for dtype in (torch.bfloat16, torch.float32):
        one = replace(case, dtype=dtype, pages_dtype=pages_dtype, scales=scales)
        batch = build(one)
        for got, wanted in zip(
            batch.attend(), as_keys_and_values(batch, one).attend(), strict=True
        ):
            assert_same_bits(got, wanted)


def test_options_of_attention_apply_to_them() -> None:
    case = replace(SMALL, window=31, alibi=True, soft_cap=4.0, sinks=True, heads=(6, 1))
    for dtype in FLOATS:
        assert_as_exact_as_torch(replace(case, dtype=dtype))


@pytest.mark.parametrize("pages_dtype", (torch.float32, torch.bfloat16, FP8[0]), ids=str)
def test_no_bit_depends_on_the_batch_or_the_threads(pages_dtype: torch.dtype) -> None:
    """More threads get fewer of the query heads each."""
    case = replace(DEEPSEEK, heads=(70, 1), lens=((1, 1200), (5, 300), (1, 33)))
    batch = build(replace(case, dtype=torch.bfloat16, pages_dtype=pages_dtype))
    expected, expected_lse = batch.attend()
    for num_threads in (3, 8):
        out, lse = batch.attend(num_threads=num_threads)
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)
    for sequence, rows in enumerate((slice(0, 1), slice(1, 6), slice(6, 7))):
        assert_same_bits(batch.only([sequence]).attend()[0], expected[rows])


def test_sets_agree_on_them_in_fp32(every_cpu_isa: str) -> None:
    batch = build(DEEPSEEK)
    out, _ = batch.attend()
    native.use_cpu_isa("baseline")
    expected, _ = batch.attend()
    native.use_cpu_isa(every_cpu_isa)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("pages_dtype", (torch.float32, torch.bfloat16, FP8[0]), ids=str)
def test_one_row_is_written_for_each_token_and_no_other_slot(pages_dtype: torch.dtype) -> None:
    batch = build(replace(SMALL, lens=((1, 5), (1, 20)), pages_dtype=pages_dtype))
    keys, values = batch.pages
    memory = keys.untyped_storage()
    assert memory.nbytes() == keys.numel() * keys.element_size()
    assert values.untyped_storage().data_ptr() == memory.data_ptr()
    rows = keys[:, 0].flatten(0, 1).float()
    assert torch.equal(rows[batch.slots], batch.key[:, 0].to(pages_dtype).float())
    rows[batch.slots] = torch.nan
    assert rows.isnan().all()


def test_what_does_not_fit_them_is_refused_by_name() -> None:
    batch = build(SMALL)
    with pytest.raises(InvalidRequestError, match="must be absent") as caught:
        replace(batch, latent=False).to_write()
    assert caught.value.field == "value"
    plain = build(replace(SMALL, latent=False))
    with pytest.raises(InvalidRequestError, match="must be given") as caught:
        replace(plain, latent=True).to_write()
    assert caught.value.field == "value"
    with pytest.raises(InvalidRequestError, match="must be given") as caught:
        replace(batch.to_attend(), options=AttentionOptions())
    assert caught.value.field == "options.scale"
    large = torch.zeros(2, 1, 16, 584)
    for pages in ((large, large[..., :512]), (large, torch.zeros(2, 1, 16, 584))):
        with pytest.raises(InvalidRequestError, match="multiple of 8 up to") as caught:
            replace(batch, pages=pages).to_attend()
        assert caught.value.field == "pages"


def test_the_kernels_of_a_gpu_refuse_them_by_their_kind() -> None:
    batch = build(SMALL)
    with in_place_of_the_cpu(chosen_backend()):
        for call in (batch.write, batch.attend):
            with pytest.raises(InvalidRequestError, match="are of latent") as caught:
                call()
            assert caught.value.field == "pages"
