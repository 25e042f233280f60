"""The kernels on the CPU: torch tensors in, typed errors out.

Shapes and types are those of ``data_plane.kernels.arguments``; sums are in fp32. Every function
raises InvalidRequestError, naming the tensor, before it writes anything.
"""

from __future__ import annotations

from typing import Final, Literal, overload

import torch

from data_plane.kernels.arguments import NativeCalls, check_int
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

try:
    import kvplane_kernels as native
except ImportError as error:
    raise ImportError(
        "the native kernels (kvplane_kernels) are missing: build them with `pip install ./csrc`"
    ) from error

_CALLS: Final = NativeCalls(native, torch.device("cpu"))
_MAX_THREADS: Final = 1024


def cpu_isa() -> str:
    """The instruction set in use: avx512bf16, avx512, avx2 or baseline.

    It is the best one of the machine, or the one that KVPLANE_KERNELS_ISA names. Raises
    InvalidRequestError when the machine does not have that one.
    """
    try:
        return native.cpu_isa()
    except ValueError as error:
        _, _, wanted = str(error).partition(" must ")
        raise InvalidRequestError(f"must {wanted}", field="KVPLANE_KERNELS_ISA") from None


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    num_threads: int = 0,
) -> None:
    """Writes each token's key and value into its slot, rounded to nearest even.

    key, value: [num_tokens, num_kv_heads, head_size]. pages: see ``native_calls``.
    slots: int64 [num_tokens]; negative = do not write. Of equal slots the last token stays.
    key_scales, value_scales: float32 [1] or [num_kv_heads], of fp8 pages only: what is stored is
        key / scale, and the largest number of the type where that is larger. None = 1.
    num_threads: 0 = as many as torch uses.
    """
    _CALLS.reshape_and_cache(
        key, value, pages, slots, key_scales, value_scales, num_threads=_num_threads(num_threads)
    )


@overload
def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    options: AttentionOptions = AttentionOptions(),
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    num_threads: int = 0,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    options: AttentionOptions = AttentionOptions(),
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    num_threads: int = 0,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    options: AttentionOptions = AttentionOptions(),
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    num_threads: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of ragged query rows over paged KV: decode, prefill and append alike.

    query: [num_tokens, num_heads, head_size], the sequences' rows one after another.
    pages: see ``native_calls``; num_heads is a multiple of num_kv_heads.
    block_tables: int32 or int64 [num_sequences, max_blocks]; entries no row sees are not looked at.
    query_starts: int64 [num_sequences + 1], from 0 up to num_tokens; a sequence may have no rows.
    context_lens: int64 [num_sequences], tokens with KV in the pages, this call's own included. Row
        i of query_len has position context_len - query_len + i and sees positions up to its own.
    options: with as many alibi_slopes as query has heads, or none.
    key_scales, value_scales: those that fp8 pages were written with.
    num_threads: 0 = as many as torch uses. Not a bit of the result depends on it, nor on what else
        is in the batch.

    Returns [num_tokens, num_heads, head_size] of the query's dtype; with return_lse also float32
    [num_tokens, num_heads], the natural logarithm of the sum of the exponentials of the scores.

    The method is online softmax (Milakov and Gimelshein, 2018) over tiles of 32 tokens.
    """
    _CALLS.check_attention(
        query,
        pages,
        block_tables,
        query_starts,
        context_lens,
        options,
    )
    out = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    _CALLS.paged_attention(
        query,
        pages,
        block_tables,
        query_starts,
        context_lens,
        options,
        key_scales,
        value_scales,
        out,
        lse,
        num_threads=_num_threads(num_threads),
    )
    return out if lse is None else (out, lse)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor, *, num_threads: int = 0) -> None:
    """Copies whole blocks inside a pool, in order: a later pair may read what an earlier one wrote.

    pool: see ``native_calls``; pairs: int64 [num_pairs, 2], from and to.
    num_threads: 0 = as many as torch uses.
    """
    _CALLS.copy_blocks(pool, pairs, num_threads=_num_threads(num_threads))


def swap_blocks(
    source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, *, num_threads: int = 0
) -> None:
    """Copies whole blocks from one pool to another of the same layout, in order.

    source, destination: pools, see ``native_calls``.
    pairs: int64 [num_pairs, 2], a block of source and a block of destination.
    num_threads: 0 = as many as torch uses.
    """
    _CALLS.swap_blocks(source, destination, pairs, num_threads=_num_threads(num_threads))


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Copies blocks out of a pool, layer before block: the canonical order.

    pool: see ``native_calls``; block_ids: int64 [num_block_ids].
    Returns [num_layers, num_block_ids, 2, num_kv_heads, block_size, head_size].
    """
    return _CALLS.gather_blocks(pool, block_ids)


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copies blocks in: the inverse of ``gather_blocks``. Of equal ids the last one stays."""
    _CALLS.scatter_blocks(pool, block_ids, blocks)


def _num_threads(wanted: int) -> int:
    check_int("num_threads", wanted, _MAX_THREADS)
    return wanted or torch.get_num_threads()
