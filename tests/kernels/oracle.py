"""The kernels' definitions, in plain torch and float64.

Arguments and results are described in ``data_plane.kernels.arguments``.
"""

from __future__ import annotations

from typing import Final

import torch

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Pattern = tuple[int, int, int, int]
"""A pattern of block-sparse attention has block tokens, local blocks, stride and sliding step."""
FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def paged_attention(
    query: torch.Tensor,
    pages: Pages,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window_tokens: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    pattern: Pattern | None = None,
    seen_blocks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the logarithms of the sums of exponentials, both of ``dtype``.

    ``seen_blocks``: bool [num_sequences, num_heads, num_blocks], in place of the pattern's stride.
    """
    outs, lses = [], []
    keys, values = keys_and_values(pages)
    for s, context_len in enumerate(context_lens.tolist()):
        rows = query[int(query_starts[s]) : int(query_starts[s + 1])]
        if rows.shape[0] == 0:
            continue
        key, value = gather(
            keys, values, block_tables[s], context_len, sliding_window_tokens, rows.shape[0]
        )
        num_groups = rows.shape[1] // keys.shape[1]
        key = scaled(key, key_scales).to(dtype).repeat_interleave(num_groups, dim=0)
        value = scaled(value, value_scales).to(dtype).repeat_interleave(num_groups, dim=0)
        scores = torch.einsum("qhd,hkd->hqk", rows.to(dtype), key) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        last = torch.arange(context_len - rows.shape[0], context_len)[:, None]
        distance = torch.arange(context_len)[None, :] - last
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(dtype)[:, None, None] * distance
        hidden = distance > 0
        if sliding_window_tokens > 0:
            hidden = hidden | (distance <= -sliding_window_tokens)
        if pattern is not None:
            remote = None if seen_blocks is None else seen_blocks[s]
            heads = (rows.shape[1], keys.shape[1])
            hidden = hidden | ~in_seen_blocks(pattern, heads, last, context_len, remote)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:  # one more column, whose weight has no value
            sink = sinks.to(dtype)[:, None, None].expand(-1, rows.shape[0], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context_len]
        outs.append(torch.einsum("hqk,hkd->qhd", weights, value))
        lses.append(scores.logsumexp(dim=-1).T)
    if not outs:
        out = query.new_empty((*query.shape[:2], values.shape[3]), dtype=dtype)
        return out, query.new_empty(query.shape[:2], dtype=dtype)
    return torch.cat(outs), torch.cat(lses)


def in_seen_blocks(
    pattern: Pattern,
    heads: tuple[int, int],
    positions: torch.Tensor,
    context_len: int,
    remote: torch.Tensor | None,
) -> torch.Tensor:
    """Whether queries at ``positions`` [num_tokens, 1] see each key's block: [num_heads,
    num_tokens, context_len]. ``heads``: of queries, and of keys. ``remote``: [num_heads,
    num_blocks], the blocks seen from everywhere; None where the pattern says it.
    """
    block_tokens, local_blocks, stride, step = pattern
    blocks = torch.arange(context_len) // block_tokens
    is_local = positions // block_tokens - blocks < local_blocks
    head = torch.arange(heads[0])[:, None]
    if remote is not None:
        is_remote = remote[:, blocks]
    elif stride == 0:
        is_remote = torch.zeros(heads[0], context_len, dtype=torch.bool)
    elif step >= 0:
        is_remote = (blocks + head * step + 1) % stride == 0
    else:
        is_remote = (blocks + head // (heads[0] // heads[1]) * -step + 1) % stride == 0
    return is_local | is_remote[:, None]


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    context_len: int,
    window: int,
    query_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence, [num_kv_heads, context_len, head size] each; 0 if no query looks."""
    _, num_kv_heads, block_size, head_size = keys.shape
    key = keys.new_zeros((num_kv_heads, context_len, head_size))
    value = values.new_zeros((num_kv_heads, context_len, values.shape[3]))
    first = max(0, context_len - query_len + 1 - window) if window else 0
    seen = torch.arange(first, context_len)
    block, offset = table[seen // block_size].long(), seen % block_size
    key[:, first:] = keys[block, :, offset].transpose(0, 1)
    value[:, first:] = values[block, :, offset].transpose(0, 1)
    return key, value


def keys_and_values(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of both, [num_blocks, num_kv_heads, block_size, head size]."""
    if isinstance(pages, tuple):
        return pages
    keys, values = pages.unbind(1)
    return keys, values


def scaled(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What stored numbers, [num_kv_heads, ...], stand for."""
    if scales is None:
        return stored
    return stored.double() * scales.double().view(-1, 1, 1)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Writes each token's key and value into its slot."""
    keys, values = keys_and_values(pages)
    key = rounded(key, key_scales, keys.dtype)
    value = rounded(value, value_scales, keys.dtype)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, keys.shape[2])
            keys[block, :, offset] = key[i]
            values[block, :, offset] = value[i]


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
