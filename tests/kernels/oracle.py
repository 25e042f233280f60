"""The kernels' definitions, in plain torch and float64.

Arguments and results are described in ``data_plane.kernels.arguments``.
"""

from __future__ import annotations

from typing import Final

import torch

FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window_tokens: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the logarithms of the sums of exponentials, both of ``dtype``."""
    outs, lses = [], []
    for s, context_len in enumerate(context_lens.tolist()):
        rows = query[int(query_starts[s]) : int(query_starts[s + 1])]
        if rows.shape[0] == 0:
            continue
        key, value = gather(
            pages, block_tables[s], context_len, sliding_window_tokens, rows.shape[0]
        )
        num_groups = rows.shape[1] // pages.shape[2]
        key = scaled(key, key_scales).to(dtype).repeat_interleave(num_groups, dim=0)
        value = scaled(value, value_scales).to(dtype).repeat_interleave(num_groups, dim=0)
        scores = torch.einsum("qhd,hkd->hqk", rows.to(dtype), key) * scale
        last = torch.arange(context_len - rows.shape[0], context_len)[:, None]
        distance = torch.arange(context_len)[None, :] - last
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(dtype)[:, None, None] * distance
        hidden = distance > 0
        if sliding_window_tokens > 0:
            hidden = hidden | (distance <= -sliding_window_tokens)
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,hkd->qhd", scores.softmax(dim=-1), value))
        lses.append(scores.logsumexp(dim=-1).T)
    if not outs:
        return query.to(dtype), query.new_empty(query.shape[:2], dtype=dtype)
    return torch.cat(outs), torch.cat(lses)


def gather(
    pages: torch.Tensor, table: torch.Tensor, context_len: int, window: int, query_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence, [num_kv_heads, context_len, head_size] each; 0 if no query looks."""
    num_kv_heads, block_size, head_size = pages.shape[2:]
    key = pages.new_zeros((num_kv_heads, context_len, head_size))
    value = torch.zeros_like(key)
    first = max(0, context_len - query_len + 1 - window) if window else 0
    seen = torch.arange(first, context_len)
    block, offset = table[seen // block_size].long(), seen % block_size
    key[:, first:] = pages[block, 0, :, offset].transpose(0, 1)
    value[:, first:] = pages[block, 1, :, offset].transpose(0, 1)
    return key, value


def scaled(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What stored numbers, [num_kv_heads, ...], stand for."""
    if scales is None:
        return stored
    return stored.double() * scales.double().view(-1, 1, 1)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Writes each token's key and value into its slot."""
    key = rounded(key, key_scales, pages.dtype)
    value = rounded(value, value_scales, pages.dtype)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, pages.shape[3])
            pages[block, 0, :, offset] = key[i]
            pages[block, 1, :, offset] = value[i]


def rounded(numbers: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_size] as pages hold it. fp8 saturates; its NaN is 0x7F."""
    if dtype not in FP8:
        return numbers.to(dtype)
    numbers = numbers.float()
    if scales is not None:
        numbers = numbers / scales.view(-1, 1)
    largest = torch.finfo(dtype).max
    numbers = torch.where(numbers.isnan(), torch.nan, numbers.clamp(-largest, largest))
    return numbers.to(dtype)
