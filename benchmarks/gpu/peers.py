"""The same work by what is installed: torch's SDPA on contiguous KV, FlashInfer on our pages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FLASHINFER_WORKSPACE_BYTES = 512 << 20


def sdpa_decode(
    query: torch.Tensor, num_sequences: int, num_kv_heads: int, context: int, backend: str
) -> Callable[[], object]:
    """A step with GQA packed: the query heads of a KV head are its rows, as fast as SDPA can.

    query: [num_sequences, num_heads, head_size].
    """
    head_size = query.shape[-1]
    shape = (num_sequences, num_kv_heads, context, head_size)
    key, value = (torch.randn(shape, dtype=query.dtype, device=query.device) for _ in range(2))
    packed = query.view(num_sequences, num_kv_heads, -1, head_size)

    def run() -> object:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(packed, key, value)

    return run


def sdpa_prefill(
    batch: int, num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int
) -> Callable[[], object]:
    """Causal attention of whole prompts."""

    def random(heads: int) -> torch.Tensor:
        shape = (batch, heads, num_tokens, head_size)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    query, key, value = random(num_heads), random(num_kv_heads), random(num_kv_heads)

    def run() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return run


def flashinfer_decode(
    query: torch.Tensor, pages: torch.Tensor, tables: torch.Tensor
) -> Callable[[], object]:
    """FlashInfer's tensor-core decode on the same pages (its HND layout is ours)."""
    flashinfer = import_module("flashinfer")
    num_sequences, num_blocks = tables.shape
    _, _, num_kv_heads, block_size, head_size = pages.shape
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    counts = torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_blocks
    full = torch.full((num_sequences,), block_size, dtype=torch.int32, device=query.device)
    wrapper.plan(
        counts,
        tables.flatten(),
        full,
        query.shape[1],
        num_kv_heads,
        head_size,
        block_size,
        q_data_type=query.dtype,
        kv_data_type=pages.dtype,
    )
    return lambda: wrapper.run(query, pages)
