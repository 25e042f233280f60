"""What only the device can read is checked there: nothing out of range is used, and it is reported.

Shapes, types and sizes are refused before a launch, naming the tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import Batch, Case, build

from data_plane.kernels.arguments import AttentionArguments, HostLengths
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError


@pytest.fixture
def backend() -> DeviceBackend:
    return chosen_backend()


def batch_of(
    backend: DeviceBackend, dtype: torch.dtype, pages_dtype: torch.dtype | None = None
) -> Batch:
    case = Case(lens=((1, 20), (40, 41)), head_size=16, dtype=dtype, pages_dtype=pages_dtype)
    with in_place_of_the_cpu(backend):
        return build(case)


I64 = torch.int64
BAD_ON_THE_DEVICE: dict[str, dict[str, torch.Tensor]] = {
    "block_tables": {"block_tables": torch.full((2, 5), -1)},
    "block_tables past the pool": {"block_tables": torch.full((2, 5), 2**40)},
    "query_starts": {"query_starts": torch.tensor([0, 1, 40])},
    "query_starts that begin late": {"query_starts": torch.tensor([1, 2, 41])},
    "query_starts that fall": {"query_starts": torch.tensor([0, 50, 41])},
    "query_starts far below zero": {"query_starts": torch.tensor([0, -(2**62), 41])},
    "context_lens": {"context_lens": torch.tensor([0, 41])},
    "context_lens below zero": {"context_lens": torch.tensor([20, -1])},
    "context_lens past the table": {"context_lens": torch.tensor([2**62, 41])},
}


@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)),
    ids=str,
)
@pytest.mark.parametrize("what", BAD_ON_THE_DEVICE)
def test_the_device_tells_of(
    backend: DeviceBackend, what: str, dtype: torch.dtype, pages_dtype: torch.dtype | None
) -> None:
    batch = replace(batch_of(backend, dtype, pages_dtype), **BAD_ON_THE_DEVICE[what])
    with in_place_of_the_cpu(backend), pytest.raises(InvalidRequestError) as caught:
        batch.attend()
    assert caught.value.field == what.partition(" ")[0]


@pytest.mark.parametrize("num_scales", (1, 40))
@pytest.mark.parametrize("name", ("key_scales", "value_scales"))
@pytest.mark.parametrize("bad", (0.0, -1.0, torch.nan, torch.inf))
def test_the_device_tells_of_scales(
    backend: DeviceBackend, bad: float, name: str, num_scales: int
) -> None:
    case = Case(lens=((1, 3),), heads=(40, 40), head_size=16, dtype=torch.bfloat16)
    case = replace(case, pages_dtype=torch.float8_e4m3fn, scales="head")
    scales = torch.ones(num_scales)
    scales[-1] = bad
    with in_place_of_the_cpu(backend):
        batch = build(case)
        batch.attend()
        spoiled = replace(batch, **{name: scales})
        for call in (spoiled.attend, spoiled.write):
            with pytest.raises(InvalidRequestError, match="finite and above 0") as caught:
                call()
            assert caught.value.field == name


def test_the_context_of_a_sequence_without_rows_may_be_anything(backend: DeviceBackend) -> None:
    with in_place_of_the_cpu(backend):
        batch = build(Case(lens=((1, 20), (0, 0)), head_size=16))
        expected, _ = batch.attend()
        out, _ = replace(batch, context_lens=torch.tensor([20, 2**62])).attend()
    assert torch.equal(out, expected)


def test_more_rows_than_were_announced_are_told(backend: DeviceBackend) -> None:
    batch = batch_of(backend, torch.float32)
    with pytest.raises(InvalidRequestError) as caught:
        attend(backend, batch, max_query_len=39)
    assert caught.value.field == "query_starts"
    attend(backend, batch, max_query_len=40)


BAD_BEFORE: dict[str, dict[str, Any]] = {
    "query: must have dtype": {"query": torch.zeros(41, 4, 16, dtype=torch.float64)},
    "query: must be [41, 4, 16]": {"query": torch.zeros(41, 4, 8)},
    "query: must have a multiple": {"query": torch.zeros(41, 3, 16)},
    "query: must be contiguous": {"query": torch.zeros(41, 16, 4).transpose(1, 2)},
    "query: must be a dense tensor on": {"query": torch.zeros(41, 4, 16, device="meta")},
    "pages: must be [9, 2, 2, 16, 16]": {"pages": torch.zeros(9, 3, 2, 16, 16)},
    "pages: must have a head size": {"pages": torch.zeros(9, 2, 2, 16, 12)},
    "pages: must hold": {"pages": torch.zeros(9, 2, 0, 16, 16)},
    "block_tables: must have dtype": {"block_tables": torch.zeros(2, 3)},
    "block_tables: must be [2, 3]": {"block_tables": torch.zeros(3, 3, dtype=I64)},
    "query_starts: must be [3]": {"query_starts": torch.tensor([0, 41])},
    "context_lens: must have dtype": {"context_lens": torch.tensor([20, 41]).int()},
    "options.alibi_slopes: must be none or 4": {
        "options": AttentionOptions(alibi_slopes=(0.0,) * 2)
    },
    "max_query_len: must be at least 0 and below 1073741824, is -1": {"max_query_len": -1},
}


@pytest.mark.parametrize("message", BAD_BEFORE)
def test_attention_refuses(backend: DeviceBackend, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        attend(backend, batch_of(backend, torch.float32), **BAD_BEFORE[message])
    assert str(caught.value).startswith(message)


def test_a_workspace_that_is_too_small_is_refused_or_told(backend: DeviceBackend) -> None:
    with in_place_of_the_cpu(backend):
        batch = build(Case(lens=((1, 130), (40, 41)), head_size=16))
    there = backend._all_there(batch.to_attend())
    before = backend.kernels.attention_workspace_bytes(there, 0)
    needed = backend.kernels.attention_workspace_bytes(there, 3)  # the splits of the first
    for num_bytes, field in ((before - 1, "workspace_bytes"), (before, "workspace"), (needed, "")):
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=backend.device)
        if not field:
            backend.kernels.paged_attention(there, workspace=workspace)
            backend.check_faults()
            continue
        with pytest.raises(InvalidRequestError) as caught:
            backend.kernels.paged_attention(there, workspace=workspace)
            backend.check_faults()
        assert caught.value.field == field


def test_lengths_on_the_host_that_are_not_those_of_the_device_are_told(
    backend: DeviceBackend,
) -> None:
    with in_place_of_the_cpu(backend):
        batch = build(Case(lens=((1, 130), (1, 300)), head_size=16))
    lengths = HostLengths(np.array([0, 1, 2]), np.array([130, 200]))
    with pytest.raises(InvalidRequestError) as caught:
        backend.paged_attention(replace(batch.to_attend(), lengths=lengths))
    assert caught.value.field == "workspace"


@pytest.mark.parametrize("split_tokens", (0, 63, 96, -64))
def test_splits_of_odd_lengths_are_refused(split_tokens: int) -> None:
    backend = chosen_backend()
    batch = batch_of(backend, torch.float32)
    with pytest.raises(InvalidRequestError) as caught:
        attend(chosen_backend(split_tokens=split_tokens), batch)
    assert caught.value.field is not None and caught.value.field.startswith("split_tokens")


def attend(backend: DeviceBackend, batch: Batch, **changed: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "query": batch.query,
        "pages": batch.pages,
        "block_tables": batch.block_tables,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "options": AttentionOptions(scale=0.25),
    } | changed
    return backend.paged_attention(AttentionArguments(**arguments))
