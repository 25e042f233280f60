"""Malformed arguments are refused with the tensor's name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import Case, assert_same_bits, build

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

kernels = CpuKernels()

I64 = torch.int64


def attention(**changed: Any) -> dict[str, Any]:
    batch = build(Case(lens=((1, 20), (3, 33)), head_size=16))
    return {
        "query": batch.query,
        "pages": batch.pages,
        "block_tables": batch.block_tables,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "options": AttentionOptions(scale=0.25),
    } | changed


def attend(**arguments: Any) -> torch.Tensor:
    return kernels.paged_attention(AttentionArguments(**arguments))


def write(**arguments: Any) -> None:
    kernels.reshape_and_cache(WriteArguments(**arguments))


def without_memory(*shape: int) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_ATTENTION: dict[str, dict[str, Any]] = {
    "query: must have dtype float32": {"query": torch.zeros(4, 4, 16, dtype=torch.float64)},
    "query: must be [4, 4, 16]": {"query": torch.zeros(4, 4, 8)},
    "query: must be [num_tokens": {"query": torch.zeros(4, 64)},
    "query: must have a multiple": {"query": torch.zeros(4, 5, 16)},
    "query: must be a tensor": {"query": [[0.0]]},
    "query: must be contiguous": {"query": torch.zeros(4, 16, 4).transpose(1, 2)},
    "query: must be a dense tensor on cpu": {"query": torch.zeros(4, 4, 16, device="meta")},
    "query: must have memory": {"query": without_memory(4, 4, 16)},
    "pages: must have memory": {"pages": without_memory(9, 2, 2, 16, 16)},
    "query: must be a dense": {"query": torch.zeros(4, 4, 16).to_sparse()},
    "pages: must be [num_blocks": {"pages": torch.zeros(4, 2, 16, 16)},
    "pages: must have dtype float32": {"pages": torch.zeros(9, 2, 2, 16, 16, dtype=torch.uint8)},
    "pages: must be [9, 2, 2, 16, 16]": {"pages": torch.zeros(9, 3, 2, 16, 16)},
    "pages: must hold at least one": {"pages": torch.zeros(9, 2, 0, 16, 16)},
    "pages: must have a head size": {"pages": torch.zeros(9, 2, 2, 16, 12)},
    "pages: must have a head size that": {"pages": torch.zeros(9, 2, 2, 16, 520)},
    "pages: must be contiguous": {"pages": torch.zeros(9, 2, 2, 16, 16).transpose(3, 4)},
    "block_tables: must have dtype int32": {"block_tables": torch.zeros(2, 3)},
    "block_tables: must be [num_sequences": {"block_tables": torch.zeros(3, dtype=I64)},
    "block_tables: must be [2, 3]": {"block_tables": torch.zeros(3, 3, dtype=I64)},
    "block_tables[0, 0]: must be at least 0": {"block_tables": torch.full((2, 3), -1)},
    "block_tables[0, 0]: must": {"block_tables": torch.full((2, 3), 2**62)},
    "context_lens[0]: must be": {"block_tables": torch.zeros(2, 1, dtype=I64)},
    "query_starts: must have dtype int64": {"query_starts": torch.tensor([0.0, 1.0, 4.0])},
    "query_starts: must be [3]": {"query_starts": torch.tensor([0, 4])},
    "query_starts[0]: must": {"query_starts": torch.tensor([1, 2, 4])},
    "query_starts[2]: must be at least 4 and below 5, is 3": {
        "query_starts": torch.tensor([0, 1, 3])
    },
    "query_starts[2]: must be at least 1": {"query_starts": torch.tensor([0, 1, 5])},
    "query_starts[2]: must be at least 3": {"query_starts": torch.tensor([0, 3, 2])},
    "query_starts[1]: must": {"query_starts": torch.tensor([0, 2**63 - 1, -(2**63)])},
    "context_lens: must be [num_sequences]": {"context_lens": torch.tensor([[20, 33]])},
    "context_lens: must have dtype int64": {"context_lens": torch.tensor([20, 33]).int()},
    "context_lens[0]: must be at least 1": {"context_lens": torch.tensor([0, 33])},
    "context_lens[0]: must be at least": {"context_lens": torch.tensor([-5, 33])},
    "context_lens[1]: must be at least 3 and below 81": {
        "context_lens": torch.tensor([20, 2**63 - 1])
    },
    "options.alibi_slopes: must be none or 4": {
        "options": AttentionOptions(alibi_slopes=(0.0,) * 2)
    },
}


E4M3 = torch.float8_e4m3fn
BAD_SCALES: dict[str, torch.Tensor] = {
    "must be [2], is [3]": torch.ones(3),
    "must be [2], is [0]": torch.ones(0),
    "must be [1] or [num_kv_heads]": torch.ones(2, 1),
    "must have dtype float32": torch.ones(2, dtype=torch.float64),
    "must be a tensor": [1.0],  # type: ignore[dict-item]
    "must be a dense tensor on cpu": torch.ones(2, device="meta"),
    "must be finite and above 0": torch.tensor([1.0, 0.0]),
    "must be finite and above": torch.tensor([-1.0, 1.0]),
    "must be finite and": torch.tensor([torch.nan]),
    "must be finite": torch.tensor([torch.inf]),
}


@pytest.mark.parametrize("field", ("key_scales", "value_scales"))
@pytest.mark.parametrize("message", BAD_SCALES)
def test_bad_scales_are_refused_before_anything_is_written(message: str, field: str) -> None:
    attended = attention(pages=torch.zeros(9, 2, 2, 16, 16, dtype=E4M3))
    cached = caching(pages=torch.ones(4, 2, 2, 8, 16).to(E4M3))
    run: Callable[..., Any]
    for run, arguments in ((attend, attended), (write, cached)):
        with pytest.raises(InvalidRequestError) as caught:
            run(**arguments, **{field: BAD_SCALES[message]})
        assert str(caught.value).startswith(f"{field}: {message}")
        assert caught.value.field == field
    assert (cached["pages"].float() == 1).all()


@pytest.mark.parametrize("field", ("key_scales", "value_scales"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_only_fp8_pages_have_scales(dtype: torch.dtype, field: str) -> None:
    attended = attention(pages=torch.zeros(9, 2, 2, 16, 16, dtype=dtype))
    cached = caching(pages=torch.ones(4, 2, 2, 8, 16, dtype=dtype))
    run: Callable[..., Any]
    for run, arguments in ((attend, attended), (write, cached)):
        with pytest.raises(InvalidRequestError) as caught:
            run(**arguments, **{field: torch.ones(1)})
        assert str(caught.value) == f"{field}: only fp8 pages have scales"


def test_queries_keys_and_values_are_never_fp8() -> None:
    for arguments in (attention(), attention(pages=torch.zeros(9, 2, 2, 16, 16, dtype=E4M3))):
        arguments["query"] = arguments["query"].to(E4M3)
        with pytest.raises(InvalidRequestError, match="query: must have dtype float32"):
            attend(**arguments)
    for name in ("key", "value"):
        narrow = torch.zeros(3, 2, 16, dtype=E4M3)
        with pytest.raises(InvalidRequestError, match=f"{name}: must have dtype float32"):
            write(**caching(**{name: narrow}))


@pytest.mark.parametrize("message", BAD_ATTENTION)
def test_attention_refuses(message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        attend(**attention(**BAD_ATTENTION[message]))
    assert str(caught.value).startswith(message)
    assert caught.value.field == message.partition(":")[0]


def test_the_arguments_are_right_before_they_are_spoilt() -> None:
    assert not attend(**attention()).isnan().any()


def caching(**changed: Any) -> dict[str, Any]:
    return {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        "pages": torch.ones(4, 2, 2, 8, 16),
        "slots": torch.tensor([0, 31, -1]),
    } | changed


BAD_CACHING: dict[str, dict[str, Any]] = {
    "key: must be [3, 2, 16]": {"key": torch.zeros(2, 2, 16)},
    "key: must have dtype": {"key": torch.zeros(3, 2, 16, dtype=torch.int32)},
    "key: must be contiguous": {"key": torch.zeros(3, 2, 32)[:, :, ::2]},
    "value: must be [3, 2, 16]": {"value": torch.zeros(3, 1, 16)},
    "value: must be [num_tokens": {"value": torch.zeros(3, 32)},
    "pages: must be [num_blocks": {"pages": torch.ones(4, 1, 2, 2, 8, 16)},
    "slots: must have dtype int64": {"slots": torch.tensor([0, 31, 2]).int()},
    "slots: must be [num_tokens]": {"slots": torch.tensor([[0, 31, 2]])},
    "slots[1]: must be at least 0 and below 32, is 32": {"slots": torch.tensor([0, 32, 2])},
    "slots[2]: must": {"slots": torch.tensor([0, 1, 2**63 - 1])},
}


@pytest.mark.parametrize("message", BAD_CACHING)
def test_caching_refuses_and_writes_nothing(message: str) -> None:
    arguments = caching(**BAD_CACHING[message])
    with pytest.raises(InvalidRequestError) as caught:
        write(**arguments)
    assert str(caught.value).startswith(message)
    assert caught.value.field == message.partition(":")[0]
    assert (arguments["pages"] == 1).all()


POOL = (3, 2, 2, 4, 8)


@pytest.mark.parametrize(
    ("pairs", "field"),
    [
        (torch.tensor([[0, 1], [5, 0]]), "pairs[1, 0]"),
        (torch.tensor([[0, 1], [0, 5]]), "pairs[1, 1]"),
        (torch.tensor([[0, 1], [-1, 0]]), "pairs[1, 0]"),
        (torch.tensor([[0, 1], [0, -(2**63)]]), "pairs[1, 1]"),
        (torch.tensor([0, 1]), "pairs"),
        (torch.tensor([[0, 1, 2]]), "pairs"),
        (torch.tensor([[0, 1]]).int(), "pairs"),
    ],
    ids=str,
)
def test_copies_refuse_bad_pairs_and_copy_nothing(pairs: torch.Tensor, field: str) -> None:
    pool, other = torch.randn(5, *POOL), torch.randn(5, *POOL)
    before, other_before = pool.clone(), other.clone()
    runs: list[Callable[[], None]] = [
        lambda: kernels.copy_blocks(pool, pairs),
        lambda: kernels.swap_blocks(pool, other, pairs),
    ]
    for run in runs:
        with pytest.raises(InvalidRequestError) as caught:
            run()
        assert caught.value.field == field
    assert_same_bits(pool, before)
    assert_same_bits(other, other_before)


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros(5, 2, 2, 4, 8),
        torch.zeros(5, 0, 2, 2, 4, 8),
        torch.zeros(5, 3, 1, 2, 4, 8),
        torch.zeros(5, 3, 2, 2, 4, 7),
        torch.zeros(5, 3, 2, 2, 4, 8, dtype=torch.float64),
        torch.zeros(3, 5, 2, 2, 4, 8).transpose(0, 1),
    ],
    ids=lambda pool: f"{list(pool.shape)}-{pool.dtype}",
)
def test_what_is_no_pool_is_refused(pool: torch.Tensor) -> None:
    good, pairs, ids = (
        torch.zeros(5, *POOL),
        torch.zeros(1, 2, dtype=I64),
        torch.zeros(1, dtype=I64),
    )
    for field, run in (
        ("pool", lambda: kernels.copy_blocks(pool, pairs)),
        ("source", lambda: kernels.swap_blocks(pool, good, pairs)),
        ("destination", lambda: kernels.swap_blocks(good, pool, pairs)),
        ("pool", lambda: kernels.gather_blocks(pool, ids)),
        ("pool", lambda: kernels.scatter_blocks(pool, ids, good[:1].transpose(0, 1))),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            run()
        assert caught.value.field == field


def test_pools_of_another_layout_or_dtype_do_not_swap() -> None:
    pool, pairs = torch.zeros(5, *POOL), torch.zeros(1, 2, dtype=I64)
    for other in (torch.zeros(5, 3, 2, 2, 8, 8), pool.half(), torch.zeros(5, 4, 2, 2, 4, 8)):
        with pytest.raises(InvalidRequestError) as caught:
            kernels.swap_blocks(pool, other, pairs)
        assert caught.value.field == "destination"


@pytest.mark.parametrize("block_id", (-1, 5, 2**62))
def test_gather_and_scatter_refuse_ids_outside_the_pool(block_id: int) -> None:
    pool, ids = torch.ones(5, *POOL), torch.tensor([0, block_id])
    for run in (
        lambda: kernels.gather_blocks(pool, ids),
        lambda: kernels.scatter_blocks(pool, ids, torch.zeros(3, 2, *POOL[1:])),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            run()
        assert caught.value.field == "block_ids[1]"
    assert (pool == 1).all()


def test_scatter_refuses_blocks_of_another_shape_or_dtype() -> None:
    pool, ids = torch.ones(5, *POOL), torch.tensor([0, 1])
    for blocks in (torch.zeros(2, 3, *POOL[1:]), torch.zeros(3, 2, *POOL[1:]).half()):
        with pytest.raises(InvalidRequestError) as caught:
            kernels.scatter_blocks(pool, ids, blocks)
        assert caught.value.field == "blocks"
