"""Malformed arguments are refused with the tensor's name, before anything is written. What only a
device can read is checked there: nothing out of range is used, and it is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from backends import ONE_OF_EACH, DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import Case, assert_same_bits, build

from data_plane.kernels.arguments import AttentionArguments, HostLengths, WriteArguments
from data_plane.kernels.backend import Kernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

I64, F32, BF16, E4M3 = torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn
Attention = dict[str, Any]
one_of_each = pytest.mark.parametrize("backend", ONE_OF_EACH, indirect=True)


def attention(
    dtype: torch.dtype = F32, pages_dtype: torch.dtype | None = None, **changed: Any
) -> Attention:
    lens = ((1, 20), (3, 33))
    batch = build(Case(lens=lens, head_size=16, dtype=dtype, pages_dtype=pages_dtype))
    names = ("query", "pages", "block_tables", "query_starts", "context_lens")
    given = {name: getattr(batch, name) for name in names}
    return given | {"options": AttentionOptions(scale=0.25)} | changed


def attend(kernels: Kernels, arguments: Attention) -> torch.Tensor:
    return kernels.paged_attention(AttentionArguments(**arguments))


def write(kernels: Kernels, arguments: dict[str, Any]) -> None:
    kernels.reshape_and_cache(WriteArguments(**arguments))


def refused(call: Callable[..., Any], *arguments: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call(*arguments)
    return caught.value


def assert_says(error: InvalidRequestError, message: str) -> None:
    """The message begins with the field."""
    assert str(error).startswith(message)
    assert error.field == message.partition(":")[0]


def without_memory(*shape: int) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_ATTENTION: dict[str, Attention] = {
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
    "query_starts: must have dtype int64": {"query_starts": torch.tensor([0.0, 1.0, 4.0])},
    "query_starts: must be [3]": {"query_starts": torch.tensor([0, 4])},
    "context_lens: must be [num_sequences]": {"context_lens": torch.tensor([[20, 33]])},
    "context_lens: must have dtype int64": {"context_lens": torch.tensor([20, 33]).int()},
    "options.alibi_slopes: must be none or 4": {
        "options": AttentionOptions(alibi_slopes=(0.0,) * 2)
    },
}
# What the CPU says of values, which a device reports by the tensor.
BAD_VALUES: dict[str, Attention] = {
    "block_tables[0, 0]: must be at least 0": {"block_tables": torch.full((2, 3), -1)},
    "block_tables[0, 0]: must": {"block_tables": torch.full((2, 3), 2**62)},
    "context_lens[0]: must be": {"block_tables": torch.zeros(2, 1, dtype=I64)},
    "query_starts[0]: must": {"query_starts": torch.tensor([1, 2, 4])},
    "query_starts[2]: must be at least 4 and below 5, is 3": {
        "query_starts": torch.tensor([0, 1, 3])
    },
    "query_starts[2]: must be at least 1": {"query_starts": torch.tensor([0, 1, 5])},
    "query_starts[2]: must be at least 3": {"query_starts": torch.tensor([0, 3, 2])},
    "query_starts[1]: must": {"query_starts": torch.tensor([0, 2**63 - 1, -(2**63)])},
    "context_lens[0]: must be at least 1": {"context_lens": torch.tensor([0, 33])},
    "context_lens[0]: must be at least": {"context_lens": torch.tensor([-5, 33])},
    "context_lens[1]: must be at least 3 and below 81": {
        "context_lens": torch.tensor([20, 2**63 - 1])
    },
}


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


@one_of_each
def test_the_arguments_are_right_before_they_are_spoilt(backend: Kernels) -> None:
    assert not attend(backend, attention()).isnan().any()
    write(backend, caching())


@one_of_each
@pytest.mark.parametrize("message", BAD_ATTENTION)
def test_attention_refuses(backend: Kernels, message: str) -> None:
    assert_says(refused(attend, backend, attention(**BAD_ATTENTION[message])), message)


@pytest.mark.parametrize("message", BAD_VALUES)
@pytest.mark.parametrize(
    ("dtype", "pages_dtype"), ((F32, None), (BF16, None), (BF16, E4M3)), ids=str
)
@one_of_each
def test_values_are_checked_by_who_reads_them(
    backend: Kernels, dtype: torch.dtype, pages_dtype: torch.dtype | None, message: str
) -> None:
    error = refused(attend, backend, attention(dtype, pages_dtype, **BAD_VALUES[message]))
    if isinstance(backend, DeviceBackend):
        assert error.field == message.partition("[")[0]
    else:
        assert_says(error, message)


@one_of_each
@pytest.mark.parametrize("message", BAD_CACHING)
def test_caching_refuses_and_writes_nothing(backend: Kernels, message: str) -> None:
    arguments = caching(**BAD_CACHING[message])
    error = refused(write, backend, arguments)
    if isinstance(backend, DeviceBackend) and message.startswith("slots["):
        assert error.field == "slots"
        arguments["pages"][0, :, :, :3] = 1  # the other tokens' slots
    else:
        assert_says(error, message)
    assert (arguments["pages"] == 1).all()


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


@one_of_each
@pytest.mark.parametrize("field", ("key_scales", "value_scales"))
@pytest.mark.parametrize("message", BAD_SCALES)
def test_bad_scales_are_refused_before_anything_is_written(
    backend: Kernels, message: str, field: str
) -> None:
    scales = {field: BAD_SCALES[message]}
    cached = caching(pages=torch.ones(4, 2, 2, 8, 16).to(E4M3))
    assert_says(refused(attend, backend, attention(F32, E4M3) | scales), f"{field}: {message}")
    assert_says(refused(write, backend, cached | scales), f"{field}: {message}")
    if not isinstance(backend, DeviceBackend) or "finite" not in message:  # which its kernels find
        assert (cached["pages"].float() == 1).all()


@pytest.mark.parametrize("field", ("key_scales", "value_scales"))
def test_a_device_reads_more_scales_than_a_warp_has_lanes(
    device: DeviceBackend, field: str
) -> None:
    case = Case(((1, 3),), (40, 40), 16, dtype=BF16, pages_dtype=E4M3, scales="head")
    batch = build(case)
    batch.attend()
    scales = torch.ones(40)
    scales[-1] = torch.nan
    spoiled = replace(batch, **{field: scales})
    for call in (spoiled.attend, spoiled.write):
        assert refused(call).field == field


@pytest.mark.parametrize("field", ("key_scales", "value_scales"))
@pytest.mark.parametrize("dtype", (F32, torch.float16, BF16), ids=str)
@one_of_each
def test_only_fp8_pages_have_scales(backend: Kernels, dtype: torch.dtype, field: str) -> None:
    scales, message = {field: torch.ones(1)}, f"{field}: only fp8 pages have scales"
    cached = caching(pages=torch.ones(4, 2, 2, 8, 16, dtype=dtype))
    assert str(refused(attend, backend, attention(F32, dtype) | scales)) == message
    assert str(refused(write, backend, cached | scales)) == message


@one_of_each
def test_queries_keys_and_values_are_never_fp8(backend: Kernels) -> None:
    for pages_dtype in (F32, E4M3):
        arguments = attention(F32, pages_dtype)
        arguments["query"] = arguments["query"].to(E4M3)
        assert_says(refused(attend, backend, arguments), "query: must have dtype float32")
    for name in ("key", "value"):
        narrow = torch.zeros(3, 2, 16, dtype=E4M3)
        error = refused(write, backend, caching(**{name: narrow}))
        assert_says(error, f"{name}: must have dtype float32")


@one_of_each
def test_values_and_options_that_no_kernel_has_are_refused_by_name(backend: Kernels) -> None:
    batch = build(Case(lens=((1, 20),)))
    keys, values = batch.pages.unbind(1)
    bad = {
        "options.sinks": [replace(batch, sinks=torch.zeros(3))],
        "pages": [
            replace(batch, pages=pages)
            for pages in ((values[..., :32], keys), (keys, values[1:]), (keys, values.half()))
        ],
    }
    for field, batches in bad.items():
        for one in batches:
            assert refused(one.to_attend).field == field


def test_what_does_not_fit_latents_is_refused_by_name() -> None:
    latents = Case(heads=(4, 1), head_size=24, value_head_size=16, latent=True)
    batch, plain = build(latents), build(replace(latents, latent=False))
    assert_says(refused(replace(batch, latent=False).to_write), "value: must be absent")
    assert_says(refused(replace(plain, latent=True).to_write), "value: must be given")
    arguments, large = batch.to_attend(), torch.zeros(2, 1, 16, 584)
    without_scale = lambda: replace(arguments, options=AttentionOptions())  # noqa: E731
    assert_says(refused(without_scale), "options.scale: must be given")
    for pages in ((large, large[..., :512]), (large, torch.zeros(2, 1, 16, 584))):
        error = refused(replace(batch, pages=pages).to_attend)
        assert error.field == "pages" and "multiple of 8 up to" in str(error)
    with in_place_of_the_cpu(chosen_backend()):
        for call in (batch.write, batch.attend):
            error = refused(call)
            assert error.field == "pages" and "are of latent" in str(error)


def test_the_context_of_a_sequence_without_rows_may_be_anything(device: DeviceBackend) -> None:
    batch = build(Case(lens=((1, 20), (0, 0)), head_size=16))
    expected, _ = batch.attend()
    out, _ = replace(batch, context_lens=torch.tensor([20, 2**62])).attend()
    assert torch.equal(out, expected)


def test_more_rows_than_were_announced_are_told(device: DeviceBackend) -> None:
    assert refused(attend, device, attention(max_query_len=2)).field == "query_starts"
    attend(device, attention(max_query_len=3))


@pytest.mark.parametrize("wrong", (-1, (1 << 30) + 1, 1 << 32, 1 << 40))
def test_a_bound_on_query_tokens_that_no_batch_can_have_is_refused(
    device: DeviceBackend, wrong: int
) -> None:
    error = refused(attend, device, attention(max_query_len=wrong))
    assert_says(error, f"max_query_len: must be at least 0 and below 1073741824, is {wrong}")


def test_a_workspace_that_is_too_small_is_refused_or_told(device: DeviceBackend) -> None:
    batch = build(Case(lens=((1, 130), (40, 41)), head_size=16))
    there, kernels = device._all_there(batch.to_attend()), device.kernels
    before = kernels.attention_workspace_bytes(there, 0)
    needed = kernels.attention_workspace_bytes(there, 3)  # the splits of the first

    def run(num_bytes: int) -> None:
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        kernels.paged_attention(there, workspace=workspace)
        device.check_faults()

    assert refused(run, before - 1).field == "workspace_bytes"
    assert refused(run, before).field == "workspace"
    run(needed)


def test_lengths_on_the_host_that_are_not_those_of_the_device_are_told(
    device: DeviceBackend,
) -> None:
    batch = build(Case(lens=((1, 130), (1, 300)), head_size=16))
    lengths = HostLengths(np.array([0, 1, 2]), np.array([130, 200]))
    arguments = replace(batch.to_attend(), lengths=lengths)
    assert refused(device.paged_attention, arguments).field == "workspace"


@pytest.mark.parametrize("split_tokens", (0, 63, 96, -64))
def test_splits_of_odd_lengths_are_refused(split_tokens: int) -> None:
    arguments = attention()
    error = refused(attend, chosen_backend(split_tokens=split_tokens), arguments)
    assert error.field is not None and error.field.startswith("split_tokens")


POOL = (3, 2, 2, 4, 8)


@pytest.mark.parametrize(
    ("pairs", "field"),
    [
        (torch.tensor([[0, 1], [2, 3], [5, 0]]), "pairs[2, 0]"),
        (torch.tensor([[0, 1], [0, 5]]), "pairs[1, 1]"),
        (torch.tensor([[0, 1], [-1, 0]]), "pairs[1, 0]"),
        (torch.tensor([[0, 1], [0, -(2**63)]]), "pairs[1, 1]"),
        (torch.tensor([0, 1]), "pairs"),
        (torch.tensor([[0, 1, 2]]), "pairs"),
        (torch.tensor([[0, 1]]).int(), "pairs"),
    ],
    ids=str,
)
@one_of_each
def test_copies_refuse_bad_pairs_and_copy_nothing(
    backend: Kernels, pairs: torch.Tensor, field: str
) -> None:
    pool, other = torch.randn(2, 5, *POOL).unbind()
    before, other_before = pool.clone(), other.clone()
    assert refused(backend.copy_blocks, pool, pairs).field == field
    assert refused(backend.swap_blocks, pool, other, pairs).field == field
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
@one_of_each
def test_what_is_no_pool_is_refused(backend: Kernels, pool: torch.Tensor) -> None:
    good, pairs = torch.zeros(5, *POOL), torch.zeros(1, 2, dtype=I64)
    ids, blocks = torch.zeros(1, dtype=I64), good[:1].transpose(0, 1)
    assert refused(backend.copy_blocks, pool, pairs).field == "pool"
    assert refused(backend.swap_blocks, pool, good, pairs).field == "source"
    assert refused(backend.swap_blocks, good, pool, pairs).field == "destination"
    assert refused(backend.gather_blocks, pool, ids).field == "pool"
    assert refused(backend.scatter_blocks, pool, ids, blocks).field == "pool"


@one_of_each
def test_pools_of_another_layout_or_dtype_do_not_swap(backend: Kernels) -> None:
    pool, pairs = torch.zeros(5, *POOL), torch.zeros(1, 2, dtype=I64)
    for other in (torch.zeros(5, 3, 2, 2, 8, 8), pool.half(), torch.zeros(5, 4, 2, 2, 4, 8)):
        assert refused(backend.swap_blocks, pool, other, pairs).field == "destination"


@one_of_each
def test_gather_and_scatter_refuse_ids_outside_the_pool_and_other_blocks(backend: Kernels) -> None:
    pool, blocks = torch.ones(5, *POOL), torch.zeros(3, 2, *POOL[1:])
    for block_id in (-1, 5, 2**62):
        ids = torch.tensor([0, block_id])
        assert refused(backend.gather_blocks, pool, ids).field == "block_ids[1]"
        assert refused(backend.scatter_blocks, pool, ids, blocks).field == "block_ids[1]"
    ids = torch.tensor([0, 1])
    for other in (torch.zeros(2, 3, *POOL[1:]), blocks.half()):
        assert refused(backend.scatter_blocks, pool, ids, other).field == "blocks"
    assert (pool == 1).all()
