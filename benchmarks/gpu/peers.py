"""Runs a case's attention by torch.

Each peer is a function of a case that allocates its memory and returns the call to time, whose
result has the shape of ours. It raises if the peer cannot do the case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.case import BF16, Case, Settings

Call = Callable[[], torch.Tensor]


def peers_of(case: Case) -> dict[str, Callable[[], Call]]:
    """Return the peers that may be able to do a case: every sequence has the same lengths."""
    new, context = case.lens[0]
    # It takes no fp8 keys. Its causal mask is right only if nothing was cached.
    if case.is_8_bit or case.num_shared or new not in (1, context):
        return {}
    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    if Settings.tiny:  # tries the path on a simulated GPU
        backends = {"sdpa_math": SDPBackend.MATH}
    return {name: partial(sdpa, case, backend) for name, backend in backends.items()}


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
