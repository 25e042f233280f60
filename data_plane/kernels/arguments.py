"""Calls of native kernels, of every backend: arguments are checked here and nowhere else.

A layer's pages are ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, K before V: the view
``pool[:, layer]`` of ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]``, so that
one block is one run of bytes. Slot ``block * block_size + offset`` is one token's place. fp32, fp16
and bf16 may be mixed between queries, keys, values and pages; pages may also be fp8, e4m3 or e5m2,
and then have scales: what is stored is ``round(key / scale)``, saturated, and stands for ``stored *
scale``. Whatever does not fit raises InvalidRequestError, naming the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import torch

from data_plane.memory.pool import MAX_HEAD_SIZE
from data_plane.memory.upload import upload
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

FLOATS: Final = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}
FP8: Final = {torch.float8_e4m3fn: "FLOAT8_E4M3", torch.float8_e5m2: "FLOAT8_E5M2"}
STORED: Final = FLOATS | FP8
"""Types of pages, by the names that native modules have for them."""

_ANY: Final = None  # in a shape: any extent
_PAGES: Final = "[num_blocks, 2, num_kv_heads, block_size, head_size]"
_POOL: Final = "[num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]"
_HOST: Final = torch.device("cpu")


class NativeCalls:
    """Calls of one native module's functions, on tensors of one kind of device ("cpu", "cuda").

    ``more`` holds those of a function's arguments that are the backend's own.
    The values that tensors hold are checked by the operations.
    """

    def __init__(self, native: ModuleType, device: torch.device) -> None:
        self._native = native
        self._device = device
        self._dtypes = {dtype: native.Dtype.__members__[n] for dtype, n in STORED.items()}

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
        **more: Any,
    ) -> None:
        """key, value: [num_tokens, num_kv_heads, head_size]; slots: int64 [num_tokens];
        scales: float32 [1] or [num_kv_heads], None = 1.
        """
        num_kv_heads, head_size = self._check_pages(pages)
        self._check("slots", slots, "[num_tokens]", (_ANY,), (torch.int64,))
        for name, tensor in (("key", key), ("value", value)):
            shape = (slots.shape[0], num_kv_heads, head_size)
            self._check(name, tensor, "[num_tokens, num_kv_heads, head_size]", shape, FLOATS)
            _check_last_stride(name, tensor)
        slots = slots.contiguous()
        self._call(
            "reshape_and_cache",
            key=self._view(key),
            value=self._view(value),
            pages=self._view(pages),
            scales=self._scales(pages, key_scales, value_scales),
            slots=slots.data_ptr(),
            **more,
        )

    def check_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Refuses a batch or an option that does not fit."""
        num_kv_heads, head_size = self._check_pages(pages)
        self._check(
            "query", query, "[num_tokens, num_heads, head_size]", (_ANY, _ANY, head_size), FLOATS
        )
        _check_last_stride("query", query)
        num_heads = query.shape[1]
        if num_heads < 1 or num_heads % num_kv_heads != 0:
            raise InvalidRequestError(
                f"must have a multiple of the pages' {num_kv_heads} heads, has {num_heads}",
                field="query",
            )
        self._check("context_lens", context_lens, "[num_sequences]", (_ANY,), (torch.int64,))
        num_sequences = context_lens.shape[0]
        wanted = "[num_sequences + 1]"
        self._check("query_starts", query_starts, wanted, (num_sequences + 1,), (torch.int64,))
        wanted = "[num_sequences, max_blocks]"
        integers = (torch.int32, torch.int64)
        self._check("block_tables", block_tables, wanted, (num_sequences, _ANY), integers)
        num_slopes = len(options.alibi_slopes)
        if num_slopes not in (0, num_heads):
            raise InvalidRequestError(
                f"must be none or {num_heads}, one a query head, are {num_slopes}",
                field="options.alibi_slopes",
            )

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        options: AttentionOptions,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        **more: Any,
    ) -> None:
        """Attends over a batch that ``check_attention`` took. ``out`` is contiguous and of query's
        shape and dtype, ``lse`` contiguous, float32 [num_tokens, num_heads].
        """
        self.check_result("out", out, query.shape, query.dtype)
        if lse is not None:
            self.check_result("lse", lse, query.shape[:2], torch.float32)
        block_tables, query_starts = block_tables.contiguous(), query_starts.contiguous()
        context_lens = context_lens.contiguous()
        slopes = self._slopes(options)
        self._call(
            "paged_attention",
            query=self._view(query),
            out=out.data_ptr(),
            lse=_address(lse),
            pages=self._view(pages),
            scales=self._scales(pages, key_scales, value_scales),
            block_tables=block_tables.data_ptr(),
            wide_block_tables=block_tables.dtype == torch.int64,
            max_blocks=block_tables.shape[1],
            query_starts=query_starts.data_ptr(),
            context_lens=context_lens.data_ptr(),
            num_sequences=context_lens.shape[0],
            alibi_slopes=_address(slopes),
            scale=options.scale or 1.0 / math.sqrt(query.shape[2]),
            sliding_window_tokens=options.sliding_window_tokens,
            **more,
        )

    def attention_workspace_bytes(
        self, query: torch.Tensor, pages: torch.Tensor, block_tables: torch.Tensor, **more: Any
    ) -> int:
        """Bytes enough for every batch of these shapes, whatever its lengths; devices only."""
        num_bytes: int = self._call(
            "attention_workspace_bytes",
            query=self._view(query),
            pages=self._view(pages),
            max_blocks=block_tables.shape[1],
            num_sequences=block_tables.shape[0],
            **more,
        )
        return num_bytes

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor, **more: Any) -> None:
        """Copies whole blocks inside a pool. pairs: int64 [num_pairs, 2], on the host."""
        self._check_pool("pool", pool, self._device)
        self._copy("copy_blocks", pool, pool, pairs, more)

    def swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, **more: Any
    ) -> None:
        """The same from one pool to another, either of which may be on the host."""
        self._check_pool("source", source, self._device, _HOST)
        self._check_pool("destination", destination, self._device, _HOST)
        if destination.dtype != source.dtype:
            raise InvalidRequestError(
                f"must have source's dtype {source.dtype}, has {destination.dtype}",
                field="destination",
            )
        _require_shape("destination", destination, (_ANY, *source.shape[1:]))
        self._copy("swap_blocks", source, destination, pairs, more)

    def gather_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        """Copies blocks out of a pool, layer before block. block_ids: int64, on the host."""
        self._check_pool("pool", pool, self._device)
        shape = _shape_of_blocks(pool, block_ids)
        blocks = torch.empty(shape, dtype=pool.dtype, device=pool.device)
        self._pack("gather_blocks", pool, block_ids, blocks, more)
        return blocks

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor, **more: Any
    ) -> None:
        """Copies blocks in: the inverse of ``gather_blocks``."""
        self._check_pool("pool", pool, self._device)
        shape = _shape_of_blocks(pool, block_ids)
        wanted = "[num_layers, num_block_ids, 2, num_kv_heads, block_size, head_size]"
        self._check("blocks", blocks, wanted, shape, (pool.dtype,))
        self._pack("scatter_blocks", pool, block_ids, blocks.contiguous(), more)

    def _check_pages(self, pages: torch.Tensor) -> tuple[int, int]:
        """Returns num_kv_heads and head_size."""
        self._check("pages", pages, _PAGES, (_ANY,) * 5, STORED)
        _check_last_stride("pages", pages)
        _check_geometry("pages", pages)
        return pages.shape[2], pages.shape[4]

    def _check_pool(self, name: str, pool: torch.Tensor, *devices: torch.device) -> None:
        _check_tensor(name, pool, _POOL, (_ANY,) * 6, STORED, devices)
        _check_geometry(name, pool)
        if pool.shape[1] < 1:
            raise InvalidRequestError("must have at least one layer", field=name)
        if pool.shape[0] > 0 and not pool[0].is_contiguous():
            raise InvalidRequestError("must keep the bytes of a block together", field=name)

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        wanted: str,
        shape: tuple[int | None, ...],
        dtypes: Mapping[torch.dtype, str] | tuple[torch.dtype, ...],
    ) -> None:
        _check_tensor(name, tensor, wanted, shape, dtypes, (self._device,))

    def _slopes(self, options: AttentionOptions) -> torch.Tensor | None:
        if not options.alibi_slopes:
            return None
        slopes = torch.tensor(options.alibi_slopes, dtype=torch.float32)
        return slopes if self._device.type == "cpu" else upload([slopes], self._device)[0]

    def _view(self, tensor: torch.Tensor) -> Any:
        return self._native.TensorView(
            tensor.data_ptr(), self._dtypes[tensor.dtype], tensor.shape, tensor.stride()
        )

    def _scales(
        self, pages: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> Any:
        num_kv_heads = pages.shape[2]
        for name, scales in (("key_scales", key), ("value_scales", value)):
            if scales is None:
                continue
            if pages.dtype not in FP8:
                raise InvalidRequestError("only fp8 pages have scales", field=name)
            self._check(name, scales, "[1] or [num_kv_heads]", (_ANY,), (torch.float32,))
            if scales.shape[0] != 1:
                _require_shape(name, scales, (num_kv_heads,))
        strides = [0 if t is None or len(t) == 1 else t.stride(0) for t in (key, value)]
        return self._native.ScalesView(_address(key), _address(value), *strides)

    def check_result(
        self, name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtype: torch.dtype
    ) -> None:
        """Refuses memory for a result that is not contiguous, or of another shape or type."""
        self._check(name, tensor, str(list(shape)), tuple(shape), (dtype,))
        if not tensor.is_contiguous():
            raise InvalidRequestError("must be contiguous", field=name)

    def _copy(
        self,
        name: str,
        source: torch.Tensor,
        destination: torch.Tensor,
        pairs: torch.Tensor,
        more: dict[str, Any],
    ) -> None:
        _check_tensor("pairs", pairs, "[num_pairs, 2]", (_ANY, 2), (torch.int64,), (_HOST,))
        pairs = pairs.contiguous()
        self._call(
            name,
            source=source.data_ptr(),
            destination=destination.data_ptr(),
            pairs=pairs.data_ptr(),
            num_pairs=pairs.shape[0],
            source_num_blocks=source.shape[0],
            destination_num_blocks=destination.shape[0],
            source_block_bytes=source.stride(0) * source.element_size(),
            destination_block_bytes=destination.stride(0) * destination.element_size(),
            copy_bytes=math.prod(source.shape[1:]) * source.element_size(),
            **more,
        )

    def _pack(
        self,
        name: str,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        blocks: torch.Tensor,
        more: dict[str, Any],
    ) -> None:
        block_ids = block_ids.contiguous()
        self._call(
            name,
            pool=pool.data_ptr(),
            blocks=blocks.data_ptr(),
            block_ids=block_ids.data_ptr(),
            num_block_ids=block_ids.shape[0],
            num_blocks=pool.shape[0],
            num_layers=pool.shape[1],
            block_bytes=pool.stride(0) * pool.element_size(),
            page_bytes=math.prod(pool.shape[2:]) * pool.element_size(),
            **more,
        )

    def _call(self, name: str, **arguments: Any) -> Any:
        """Calls a native function; a bad id or length comes back as "<tensor>[i] must ..."."""
        try:
            return getattr(self._native, name)(**arguments)
        except IndexError as error:
            field, _, wanted = str(error).partition(" must ")
            raise InvalidRequestError(f"must {wanted}", field=field) from None


def check_int(name: str, value: int, highest: int) -> None:
    """Refuses a number that is not from 0 to ``highest``."""
    if not 0 <= value <= highest:
        raise InvalidRequestError(f"must be from 0 to {highest}, is {value}", field=name)


def _shape_of_blocks(pool: torch.Tensor, block_ids: torch.Tensor) -> tuple[int, ...]:
    """Of blocks in the canonical order."""
    _check_tensor("block_ids", block_ids, "[num_block_ids]", (_ANY,), (torch.int64,), (_HOST,))
    return (pool.shape[1], block_ids.shape[0], *pool.shape[2:])


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    wanted: str,
    shape: tuple[int | None, ...],
    dtypes: Mapping[torch.dtype, str] | tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
) -> None:
    """``wanted``: the shape in words. ``shape``: None where any extent will do."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"must be a tensor, is {type(tensor).__name__}", field=name)
    on_device = any(_is_on(tensor, device) for device in devices)
    if not on_device or tensor.layout != torch.strided:
        names = " or ".join(dict.fromkeys(str(device) for device in devices))
        raise InvalidRequestError(
            f"must be a dense tensor on {names}, is {tensor.layout} on {tensor.device}", field=name
        )
    if tensor.dim() != len(shape):
        raise InvalidRequestError(f"must be {wanted}, is {list(tensor.shape)}", field=name)
    if tensor.dtype not in dtypes:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidRequestError(f"must be of {listed}, is of {tensor.dtype}", field=name)
    _require_shape(name, tensor, shape)
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise InvalidRequestError("must have memory, has none", field=name)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """A device without an index stands for every one of its type."""
    has = tensor.device
    return has.type == device.type and device.index in (None, has.index)


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise InvalidRequestError(
            f"must be contiguous in the last dimension, has strides {tensor.stride()}", field=name
        )


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """None stands for any extent."""
    wanted = [has if n is None else n for n, has in zip(shape, tensor.shape, strict=True)]
    if wanted != list(tensor.shape):
        raise InvalidRequestError(f"must be {wanted}, is {list(tensor.shape)}", field=name)
