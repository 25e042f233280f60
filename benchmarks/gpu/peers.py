"""Runs a case's attention by torch and, where it is installed, by FlashInfer.

Each peer is a function of a case that allocates its memory and returns the call to time, whose
result has the shape of ours. It raises if the peer cannot do the case.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.case import BF16, DEVICE, Case, Settings

WORKSPACE_BYTES: Final = 512 << 20
Call = Callable[[], torch.Tensor]


def peers_of(case: Case) -> dict[str, Callable[[], Call]]:
    """Return the peers that may be able to do a case: every sequence has the same lengths."""
    new, context = case.lens[0]
    if Settings.tiny:  # tries the path on a simulated GPU
        can = not case.is_8_bit and not case.num_shared
        return {"sdpa_math": lambda: sdpa(case, SDPBackend.MATH)} if can else {}
    peers = {"flashinfer": lambda: flashinfer(case)}
    if new == 1:
        # It has two kernels for decode; the one without tensor cores lacks some group sizes.
        peers["flashinfer_tensor_cores"] = lambda: flashinfer(case, tensor_cores=True)
    if case.num_shared:
        peers["flashinfer_cascade"] = lambda: flashinfer_cascade(case)
    # SDPA takes no fp8 keys. Its causal mask is right only if nothing was cached.
    elif not case.is_8_bit and new in (1, context):
        peers["sdpa_flash"] = lambda: sdpa(case, SDPBackend.FLASH_ATTENTION)
        peers["sdpa_cudnn"] = lambda: sdpa(case, SDPBackend.CUDNN_ATTENTION)
    return peers


def sdpa(case: Case, backend: SDPBackend) -> Call:
    """Call SDPA over contiguous keys and values. For decode, the query heads of a KV head are
    packed as rows, which is fastest.
    """
    new, _ = case.lens[0]
    batch, (heads, dim) = len(case.lens), case.query.shape[1:]
    kv = torch.stack([case.kv_of(s, BF16) for s in range(batch)], dim=1)
    key, value = kv.unbind()
    if new == 1:
        query = case.query.reshape(batch, case.kv_heads, -1, dim)
        how: dict[str, Any] = {}
    else:
        query = case.query.reshape(batch, new, heads, dim).transpose(1, 2)
        how = {"is_causal": True, "enable_gqa": heads != case.kv_heads}

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(query, key, value, scale=case.scale, **how)
        return (out if new == 1 else out.transpose(1, 2)).reshape(case.query.shape)

    return run


def flashinfer(case: Case, *, tensor_cores: bool = False) -> Call:
    """Call it on the same pages: its HND layout is ours. ``tensor_cores``: for decode only."""
    module = import_module("flashinfer")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    new, context = case.lens[0]
    tables, sizes = case.tables, _sizes(case)
    blocks, last = _counts(case, tables.shape[1]), _last(case, context)
    types = {"q_data_type": case.query.dtype, "kv_data_type": case.pages.dtype}
    scales: dict[str, Any] = {}
    if case.key_scales is not None and case.value_scales is not None:
        scales = {"k_scale": case.key_scales.item(), "v_scale": case.value_scales.item()}
    if new == 1:
        # Its FlashAttention 3 takes no 8-bit keys beside 16-bit queries, but is chosen for them.
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_tensor_cores=tensor_cores,
            backend="fa2" if case.is_8_bit else "auto",
        )
        wrapper.plan(blocks, tables.flatten(), last, *sizes, **types)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "HND", backend="fa2" if case.is_8_bit else "auto"
        )
        rows = _counts(case, new)
        wrapper.plan(rows, blocks, tables.flatten(), last, *sizes, causal=True, **types)
    query, pages = case.query.contiguous(), case.pages[0]
    return lambda: wrapper.run(query, pages, **scales)


def flashinfer_cascade(case: Case) -> Call:
    """Put the shared prefix in a level of its own: one sequence, with each decode's query token."""
    module = import_module("flashinfer")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
    block = case.pages.shape[-2]
    num_shared = case.num_shared // block
    own = case.tables[:, num_shared:]
    all_rows = torch.tensor([0, len(case.lens)], dtype=torch.int32, device=DEVICE)
    all_blocks = torch.tensor([0, num_shared], dtype=torch.int32, device=DEVICE)
    in_last = torch.tensor([block], dtype=torch.int32, device=DEVICE)
    wrapper.plan(
        [all_rows, _counts(case, 1)],
        [all_blocks, _counts(case, own.shape[1])],
        [case.tables[0, :num_shared].contiguous(), own.flatten()],
        [in_last, _last(case, case.lens[0][1])],
        *_sizes(case),
        q_data_type=case.query.dtype,
    )
    query, pages = case.query.contiguous(), case.pages[0]
    return lambda: wrapper.run(query, pages)


def _sizes(case: Case) -> tuple[int, int, int, int]:
    return case.query.shape[1], case.kv_heads, case.query.shape[2], case.pages.shape[-2]


def _counts(case: Case, step: int) -> torch.Tensor:
    return (torch.arange(len(case.lens) + 1, device=DEVICE) * step).int()


def _last(case: Case, context: int) -> torch.Tensor:
    """Return the number of tokens in each sequence's last block."""
    in_last = (context - 1) % case.pages.shape[-2] + 1
    return torch.full((len(case.lens),), in_last, dtype=torch.int32, device=DEVICE)
