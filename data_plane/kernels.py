"""The typed face of the native kernels: torch tensors in, checked here and nowhere else.

A layer's pages are ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, K before V: the view
``pool[:, layer]`` of ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]``, so that
one block is one run of bytes. Slot ``block * block_size + offset`` is one token's place. fp32, fp16
and bf16 may be mixed between queries, keys, values and pages; sums are in fp32. Every function
raises InvalidRequestError, naming the tensor, before it writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, overload

import torch

from kvplane.errors import InvalidRequestError
from kvplane.layout import MAX_HEAD_SIZE

try:
    import kvplane_kernels as native
except ImportError as error:
    raise ImportError(
        "the native kernels (kvplane_kernels) are missing: build them with `pip install ./csrc`"
    ) from error

_DTYPES: Final = {
    torch.float32: native.Dtype.FLOAT32,
    torch.float16: native.Dtype.FLOAT16,
    torch.bfloat16: native.Dtype.BFLOAT16,
}
_FLOATS: Final = tuple(_DTYPES)
_MAX_FLOAT32: Final = torch.finfo(torch.float32).max
_MAX_THREADS: Final = 1024
_PAGES: Final = "[num_blocks, 2, num_kv_heads, block_size, head_size]"
_POOL: Final = "[num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]"


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
    num_threads: int = 0,
) -> None:
    """Writes each token's key and value into its slot, rounded to nearest even.

    key, value: [num_tokens, num_kv_heads, head_size]. pages: see the module.
    slots: int64 [num_tokens]; negative = do not write. Of equal slots the last token stays.
    num_threads: 0 = as many as torch uses.
    """
    num_kv_heads, head_size = _check_pages(pages)
    _check("slots", slots, "[num_tokens]", 1, (torch.int64,))
    for name, tensor in (("key", key), ("value", value)):
        _check(name, tensor, "[num_tokens, num_kv_heads, head_size]", 3, _FLOATS)
        _check_last_stride(name, tensor)
        _require_shape(name, tensor, (slots.shape[0], num_kv_heads, head_size))
    _check_int("num_threads", num_threads, _MAX_THREADS)
    slots = slots.contiguous()
    _run(
        native.reshape_and_cache,
        key=_view(key),
        value=_view(value),
        pages=_view(pages),
        slots=slots.data_ptr(),
        num_threads=num_threads or torch.get_num_threads(),
    )


@overload
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
    scale: float,
    sliding_window_tokens: int = 0,
    alibi_slopes: torch.Tensor | None = None,
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
    scale: float,
    sliding_window_tokens: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    num_threads: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of ragged query rows over paged KV: decode, prefill and append alike.

    query: [num_tokens, num_heads, head_size], the sequences' rows one after another.
    pages: see the module; num_heads is a multiple of num_kv_heads.
    block_tables: int32 or int64 [num_sequences, max_blocks]; entries no row sees are not looked at.
    query_starts: int64 [num_sequences + 1], from 0 up to num_tokens; a sequence may have no rows.
    context_lens: int64 [num_sequences], tokens with KV in the pages, this call's own included. Row
        i of query_len has position context_len - query_len + i and sees positions up to its own.
    scale: factor of the dot products.
    sliding_window_tokens: a row sees its last that many positions, itself included; 0 = all.
    alibi_slopes: float32 [num_heads]; slope * (key position - query position) is added to scores.
    num_threads: 0 = as many as torch uses. Not a bit of the result depends on it, nor on what else
        is in the batch.

    Returns [num_tokens, num_heads, head_size] of the query's dtype; with return_lse also float32
    [num_tokens, num_heads], the natural logarithm of the sum of the exponentials of the scores.

    The method is online softmax (Milakov and Gimelshein, 2018) over tiles of 32 tokens.
    """
    num_kv_heads, head_size = _check_pages(pages)
    num_heads = _check_query(query, num_kv_heads, head_size)
    _check_batch(block_tables, query_starts, context_lens)
    _check_options(num_heads, scale, sliding_window_tokens, alibi_slopes, num_threads)
    block_tables, query_starts = block_tables.contiguous(), query_starts.contiguous()
    context_lens = context_lens.contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    _run(
        native.paged_attention,
        query=_view(query),
        out=out.data_ptr(),
        lse=0 if lse is None else lse.data_ptr(),
        pages=_view(pages),
        block_tables=block_tables.data_ptr(),
        wide_block_tables=block_tables.dtype == torch.int64,
        max_blocks=block_tables.shape[1],
        query_starts=query_starts.data_ptr(),
        context_lens=context_lens.data_ptr(),
        num_sequences=context_lens.shape[0],
        alibi_slopes=0 if slopes is None else slopes.data_ptr(),
        scale=scale,
        sliding_window_tokens=sliding_window_tokens,
        num_threads=num_threads or torch.get_num_threads(),
    )
    return out if lse is None else (out, lse)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor, *, num_threads: int = 0) -> None:
    """Copies whole blocks inside a pool, in order: a later pair may read what an earlier one wrote.

    pool: see the module; pairs: int64 [num_pairs, 2], from and to.
    num_threads: 0 = as many as torch uses.
    """
    _check_pool("pool", pool)
    _copy(pool, pool, pairs, num_threads)


def swap_blocks(
    source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, *, num_threads: int = 0
) -> None:
    """Copies whole blocks from one pool to another of the same layout, in order.

    source, destination: pools, see the module.
    pairs: int64 [num_pairs, 2], a block of source and a block of destination.
    num_threads: 0 = as many as torch uses.
    """
    _check_pool("source", source)
    _check_pool("destination", destination)
    if destination.dtype != source.dtype:
        raise InvalidRequestError(
            f"must have source's dtype {source.dtype}, has {destination.dtype}", field="destination"
        )
    _require_shape("destination", destination, (destination.shape[0], *source.shape[1:]))
    _copy(source, destination, pairs, num_threads)


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Copies blocks out of a pool, layer before block: the canonical order.

    pool: see the module; block_ids: int64 [num_block_ids].
    Returns [num_layers, num_block_ids, 2, num_kv_heads, block_size, head_size].
    """
    _check_pool("pool", pool)
    _check("block_ids", block_ids, "[num_block_ids]", 1, (torch.int64,))
    blocks = torch.empty((pool.shape[1], block_ids.shape[0], *pool.shape[2:]), dtype=pool.dtype)
    _pack(native.gather_blocks, pool, block_ids, blocks)
    return blocks


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copies blocks in: the inverse of ``gather_blocks``. Of equal ids the last one stays."""
    _check_pool("pool", pool)
    _check("block_ids", block_ids, "[num_block_ids]", 1, (torch.int64,))
    _check("blocks", blocks, "[num_layers, num_block_ids, ...]", 6, (pool.dtype,))
    _require_shape("blocks", blocks, (pool.shape[1], block_ids.shape[0], *pool.shape[2:]))
    _pack(native.scatter_blocks, pool, block_ids, blocks.contiguous())


def _check_pages(pages: torch.Tensor) -> tuple[int, int]:
    """Returns num_kv_heads and head_size."""
    _check("pages", pages, _PAGES, 5, _FLOATS)
    _check_last_stride("pages", pages)
    _check_geometry("pages", pages)
    return pages.shape[2], pages.shape[4]


def _check_pool(name: str, pool: torch.Tensor) -> None:
    _check(name, pool, _POOL, 6, _FLOATS)
    _check_geometry(name, pool)
    if pool.shape[1] < 1:
        raise InvalidRequestError("must have at least one layer", field=name)
    if pool.shape[0] > 0 and not pool[0].is_contiguous():
        raise InvalidRequestError("must keep the bytes of a block together", field=name)


def _check_geometry(name: str, tensor: torch.Tensor) -> None:
    """Of pages and pools: [..., 2, num_kv_heads, block_size, head_size]."""
    halves, num_kv_heads, block_size, head_size = tensor.shape[-4:]
    if halves != 2 or num_kv_heads < 1 or block_size < 1:
        raise InvalidRequestError(
            f"must hold K and V of at least one head and token, is {tuple(tensor.shape)}",
            field=name,
        )
    if head_size % 8 != 0 or not 8 <= head_size <= MAX_HEAD_SIZE:
        raise InvalidRequestError(
            f"must have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}, has {head_size}",
            field=name,
        )


def _check_query(query: torch.Tensor, num_kv_heads: int, head_size: int) -> int:
    """Returns num_heads."""
    _check("query", query, "[num_tokens, num_heads, head_size]", 3, _FLOATS)
    _check_last_stride("query", query)
    num_tokens, num_heads, _ = query.shape
    _require_shape("query", query, (num_tokens, num_heads, head_size))
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise InvalidRequestError(
            f"must have a multiple of the pages' {num_kv_heads} heads, has {num_heads}",
            field="query",
        )
    return num_heads


def _check_batch(
    block_tables: torch.Tensor, query_starts: torch.Tensor, context_lens: torch.Tensor
) -> None:
    _check("context_lens", context_lens, "[num_sequences]", 1, (torch.int64,))
    _check("query_starts", query_starts, "[num_sequences + 1]", 1, (torch.int64,))
    _require_shape("query_starts", query_starts, (context_lens.shape[0] + 1,))
    wanted = (torch.int32, torch.int64)
    _check("block_tables", block_tables, "[num_sequences, max_blocks]", 2, wanted)
    _require_shape("block_tables", block_tables, (context_lens.shape[0], block_tables.shape[1]))


def _check_options(
    num_heads: int,
    scale: float,
    sliding_window_tokens: int,
    alibi_slopes: torch.Tensor | None,
    num_threads: int,
) -> None:
    if not abs(scale) <= _MAX_FLOAT32:
        raise InvalidRequestError(f"must be finite in float32, is {scale}", field="scale")
    _check_int("sliding_window_tokens", sliding_window_tokens, 2**31 - 1)
    _check_int("num_threads", num_threads, _MAX_THREADS)
    if alibi_slopes is not None:
        _check("alibi_slopes", alibi_slopes, "[num_heads]", 1, (torch.float32,))
        _require_shape("alibi_slopes", alibi_slopes, (num_heads,))


def _check(
    name: str, tensor: torch.Tensor, shape: str, rank: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"must be a tensor, is {type(tensor).__name__}", field=name)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidRequestError(
            f"must be a dense tensor on the CPU, is {tensor.layout} on {tensor.device}", field=name
        )
    if tensor.dim() != rank:
        raise InvalidRequestError(f"must be {shape}, is {list(tensor.shape)}", field=name)
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidRequestError(f"must be of {wanted}, is of {tensor.dtype}", field=name)


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise InvalidRequestError(
            f"must be contiguous in the last dimension, has strides {tensor.stride()}", field=name
        )


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidRequestError(f"must be {list(shape)}, is {list(tensor.shape)}", field=name)


def _check_int(name: str, value: int, highest: int) -> None:
    if not 0 <= value <= highest:
        raise InvalidRequestError(f"must be from 0 to {highest}, is {value}", field=name)


def _copy(
    source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, num_threads: int
) -> None:
    _check_int("num_threads", num_threads, _MAX_THREADS)
    _check("pairs", pairs, "[num_pairs, 2]", 2, (torch.int64,))
    _require_shape("pairs", pairs, (pairs.shape[0], 2))
    pairs = pairs.contiguous()
    _run(
        native.copy_blocks,
        source=source.data_ptr(),
        destination=destination.data_ptr(),
        pairs=pairs.data_ptr(),
        num_pairs=pairs.shape[0],
        source_num_blocks=source.shape[0],
        destination_num_blocks=destination.shape[0],
        source_block_bytes=source.stride(0) * source.element_size(),
        destination_block_bytes=destination.stride(0) * destination.element_size(),
        copy_bytes=math.prod(source.shape[1:]) * source.element_size(),
        num_threads=num_threads or torch.get_num_threads(),
    )


def _pack(
    run: Callable[..., None], pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
) -> None:
    block_ids = block_ids.contiguous()
    _run(
        run,
        pool=pool.data_ptr(),
        blocks=blocks.data_ptr(),
        block_ids=block_ids.data_ptr(),
        num_block_ids=block_ids.shape[0],
        num_blocks=pool.shape[0],
        num_layers=pool.shape[1],
        block_bytes=pool.stride(0) * pool.element_size(),
        page_bytes=math.prod(pool.shape[2:]) * pool.element_size(),
    )


def _view(tensor: torch.Tensor) -> native.TensorView:
    return native.TensorView(
        tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.shape, tensor.stride()
    )


def _run(run: Callable[..., None], **arguments: Any) -> None:
    """Calls a native operation; a bad id or length comes back as "<tensor>[i] must ..."."""
    try:
        run(**arguments)
    except IndexError as error:
        name, _, wanted = str(error).partition(" must ")
        raise InvalidRequestError(f"must {wanted}", field=name) from None
