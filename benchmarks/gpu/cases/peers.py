"""Runs the same attention by torch, and by FlashAttention 3 and FlashInfer where installed.

Each peer is a function of a problem that allocates its memory and returns the call to time. It
raises if the peer cannot do the problem.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.cases.problem import Problem

Make = Callable[[], "Call"]

FLASHINFER_WORKSPACE_BYTES: Final = 512 << 20
FLASH_ATTENTION_PAGE: Final = 256  # tokens; FlashAttention 2 takes only multiples of it


class CanNotError(Exception):
    """The peer, or its installed version, cannot do the problem."""


@dataclass(frozen=True)
class Call:
    """``run`` is timed; ``rows`` converts its result to the form of ours, and is not timed."""

    run: Callable[[], torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda answer: answer


def peers_of(problem: Problem) -> dict[str, Make]:
    """Return the peers that may be able to do the problem. Each is prepared when it is called."""
    flashinfer: dict[str, Make] = {"flashinfer": lambda: _flashinfer(problem)}
    if problem.shape.new == 1:
        # It has two kernels for decode; the one without tensor cores lacks some group sizes.
        flashinfer["flashinfer_tensor_cores"] = lambda: _flashinfer(problem, tensor_cores=True)
    if problem.shape.shared:
        return flashinfer | {"flashinfer_cascade": lambda: _flashinfer_cascade(problem)}
    if problem.is_fp8:  # Torch's attention takes no fp8 keys.
        return flashinfer
    varlen: dict[str, Make] = {
        "varlen": lambda: _varlen(problem),
        "varlen_paged": lambda: _varlen_paged(problem, problem.shape.block),
        "varlen_paged_256": lambda: _varlen_paged(problem, FLASH_ATTENTION_PAGE),
        "flash_attention_3": lambda: _flash_attention_3(problem),
    }
    # SDPA's causal mask is aligned to the top left, which is right only if nothing was cached.
    if problem.shape.new not in (1, problem.shape.context):
        return varlen | flashinfer
    return {
        "sdpa_flash": lambda: _sdpa(problem, SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": lambda: _sdpa(problem, SDPBackend.CUDNN_ATTENTION),
        **varlen,
        **flashinfer,
    }


def contiguous_kv(problem: Problem, *, tokens_first: bool) -> torch.Tensor:
    """Return [2, batch, kv_heads, context, head], or context before kv_heads."""
    shape = problem.shape
    sizes = (shape.context, shape.kv_heads) if tokens_first else (shape.kv_heads, shape.context)
    kv = torch.empty(
        (2, shape.batch, *sizes, shape.head), dtype=torch.bfloat16, device=problem.device
    )
    for sequence in range(shape.batch):
        own = problem.kv_of(sequence, torch.bfloat16)
        kv[:, sequence] = own.transpose(1, 2) if tokens_first else own
    return kv


def _sdpa(problem: Problem, backend: SDPBackend) -> Call:
    """Call SDPA. For decode, the query heads of a KV head are packed as rows, which is fastest."""
    shape = problem.shape
    key, value = contiguous_kv(problem, tokens_first=False).unbind()
    if shape.new == 1:
        query = problem.query.view(shape.batch, shape.kv_heads, -1, shape.head)
        how: dict[str, Any] = {}
    else:
        query = problem.query.view(shape.batch, shape.new, shape.heads, shape.head).transpose(1, 2)
        how = {"is_causal": True, "enable_gqa": shape.heads != shape.kv_heads}

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, scale=problem.scale, **how)

    def rows(answer: torch.Tensor) -> torch.Tensor:
        in_order = answer if shape.new == 1 else answer.transpose(1, 2)
        return in_order.reshape(problem.query.shape)

    return Call(run, rows)


def _varlen_function() -> tuple[Callable[..., Any], set[str]]:
    """Return torch.nn.attention.varlen.varlen_attn and its parameters, which differ by version."""
    function = import_module("torch.nn.attention.varlen").varlen_attn
    return function, set(inspect.signature(function).parameters)


def _varlen_how(problem: Problem, names: set[str]) -> dict[str, Any]:
    """Return the arguments for causal attention with groups of heads, for the installed version."""
    shape = problem.shape
    how: dict[str, Any] = {}
    if shape.new > 1:
        how = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names and shape.heads != shape.kv_heads:
        how["enable_gqa"] = True
    if "scale" in names:  # The default is the same: one over the root of the head size.
        how["scale"] = problem.scale
    return how


def _counts(problem: Problem, step: int) -> torch.Tensor:
    counts = torch.arange(problem.shape.batch + 1, device=problem.device) * step
    return counts.to(torch.int32)


def _varlen(problem: Problem) -> Call:
    """Call it on contiguous keys and values; the causal mask is aligned to the bottom right."""
    shape = problem.shape
    function, names = _varlen_function()
    key, value = contiguous_kv(problem, tokens_first=True).flatten(1, 2).unbind()
    lens = (_counts(problem, shape.new), _counts(problem, shape.context), shape.new, shape.context)
    how = _varlen_how(problem, names)
    return Call(lambda: function(problem.query, key, value, *lens, **how))


def _varlen_paged(problem: Problem, page: int) -> Call:
    """Call it on pages: ours if they have the size that it needs, otherwise copies in that size."""
    shape = problem.shape
    function, names = _varlen_function()
    if not {"block_table", "seqused_k"} <= names:
        raise CanNotError("this torch's varlen_attn has no block_table")
    if page == shape.block:
        key, value = (problem.pages[:, kv].transpose(1, 2) for kv in range(2))
        tables = problem.tables
    else:
        if shape.context % page != 0:
            raise CanNotError(f"the context is not a multiple of {page}")
        tables = torch.randperm(shape.batch * (shape.context // page), device=problem.device)
        kv = contiguous_kv(problem, tokens_first=True)
        pages = torch.empty_like(kv).view(2, -1, page, shape.kv_heads, shape.head)
        pages[:, tables] = kv.view_as(pages)
        key, value = pages.unbind()
        tables = tables.int().view(shape.batch, -1)
    how = _varlen_how(problem, names)
    how |= {"block_table": tables, "seqused_k": problem.lens.int()}
    starts = _counts(problem, shape.new)
    lens = (starts, None, shape.new, shape.context)
    return Call(lambda: function(problem.query, key, value, *lens, **how))


def _flash_attention_3(problem: Problem) -> Call:
    """Call it on the same pages: it takes any page size and any strides. Not over fp8, for which
    its queries have to be fp8 too.
    """
    function = import_module("flash_attn_interface").flash_attn_with_kvcache
    shape = problem.shape
    query = problem.query.view(shape.batch, shape.new, shape.heads, shape.head)
    key, value = (problem.pages[:, kv].transpose(1, 2) for kv in range(2))
    how = {"cache_seqlens": problem.lens.int(), "page_table": problem.tables}

    def run() -> torch.Tensor:
        answer: torch.Tensor = function(
            query, key, value, softmax_scale=problem.scale, causal=True, **how
        )
        return answer

    return Call(run, lambda answer: answer.reshape(problem.query.shape))


def _flashinfer(problem: Problem, *, tensor_cores: bool = False) -> Call:
    """Call it on the same pages: its HND layout is ours. ``tensor_cores``: for decode only."""
    flashinfer = import_module("flashinfer")
    shape = problem.shape
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
    blocks = _counts(problem, problem.tables.shape[1])
    in_last = (shape.context - 1) % shape.block + 1
    last = torch.full((shape.batch,), in_last, dtype=torch.int32, device=problem.device)
    types = {"q_data_type": problem.query.dtype, "kv_data_type": problem.pages.dtype}
    sizes = (shape.heads, shape.kv_heads, shape.head, shape.block)
    scales: dict[str, Any] = {}
    if problem.key_scales is not None and problem.value_scales is not None:
        scales = {"k_scale": problem.key_scales.item(), "v_scale": problem.value_scales.item()}
    if shape.new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=tensor_cores
        )
        wrapper.plan(blocks, problem.tables.flatten(), last, *sizes, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        rows = _counts(problem, shape.new)
        wrapper.plan(rows, blocks, problem.tables.flatten(), last, *sizes, causal=True, **types)

    return Call(lambda: wrapper.run(problem.query, problem.pages, **scales))


def _flashinfer_cascade(problem: Problem) -> Call:
    """Put the shared prefix in a level of its own: one sequence, with each decode's query token."""
    flashinfer = import_module("flashinfer")
    shape, device = problem.shape, problem.device
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
    num_shared = shape.num_shared_blocks
    own = problem.tables[:, num_shared:]
    all_rows = torch.tensor([0, shape.batch], dtype=torch.int32, device=device)
    all_blocks = torch.tensor([0, num_shared], dtype=torch.int32, device=device)
    in_last = torch.tensor([shape.block], dtype=torch.int32, device=device)
    in_last_own = torch.full_like(problem.lens, (shape.context - 1) % shape.block + 1).int()
    wrapper.plan(
        [all_rows, _counts(problem, 1)],
        [all_blocks, _counts(problem, own.shape[1])],
        [problem.tables[0, :num_shared].contiguous(), own.flatten()],
        [in_last, in_last_own],
        *(shape.heads, shape.kv_heads, shape.head, shape.block),
        q_data_type=problem.query.dtype,
    )
    return Call(lambda: wrapper.run(problem.query, problem.pages))
