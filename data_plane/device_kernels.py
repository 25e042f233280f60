"""The kernels of a device: the functions of ``data_plane.kernels`` on a GPU's tensors, or emulated.

The native module is an argument: ``kvplane_kernels._cuda``, or the emulator's. Calls are put on a
stream and not waited for. Ids of blocks to copy stay on the host and are checked at the call; what
only the device can read is checked there, and ``check_faults`` says what it found.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Final

import torch

from kvplane.errors import InvalidRequestError
from kvplane.layout import MAX_HEAD_SIZE

_DTYPES: Final = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}
_FLOATS: Final = tuple(_DTYPES)
_FAULTS: Final = {
    "BAD_BLOCK_TABLES": ("block_tables", "must name blocks of the pages wherever a row looks"),
    "BAD_QUERY_STARTS": (
        "query_starts",
        "must rise from 0 to num_tokens, by max_query_len at most",
    ),
    "BAD_CONTEXT_LENS": ("context_lens", "must cover the sequence's rows and fit its table"),
    "BAD_SLOTS": ("slots", "must be slots of the pages"),
}


class DeviceKernels:
    """The operations on one device. Shapes and meanings are those of ``data_plane.kernels``.

    native: the compiled module. device: where all tensors but pairs and block_ids lie.
    split_tokens: a short query's context is cut at multiples of it, a multiple of 64; the bits of
        an answer depend on it, and on nothing else of a batch.
    """

    def __init__(
        self, native: ModuleType, device: torch.device, *, split_tokens: int = 512
    ) -> None:
        self._native = native
        self._device = device
        self._split_tokens = split_tokens
        self._dtypes = {dtype: native.Dtype.__members__[n] for dtype, n in _DTYPES.items()}
        self._faults = torch.zeros(1, dtype=torch.int32, device=device)

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes each token's key and value into its slot; of equal slots, either may stay."""
        num_kv_heads, head_size = self._check_pages(pages)
        self._check("slots", slots, (None,), (torch.int64,))
        for name, tensor in (("key", key), ("value", value)):
            self._check(name, tensor, (slots.shape[0], num_kv_heads, head_size), _FLOATS)
            _check_last_stride(name, tensor)
        slots = slots.contiguous()
        self._native.reshape_and_cache(
            key=self._view(key),
            value=self._view(value),
            pages=self._view(pages),
            slots=slots.data_ptr(),
            faults=self._faults.data_ptr(),
            stream=self._stream(),
        )

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float,
        sliding_window_tokens: int = 0,
        alibi_slopes: torch.Tensor | None = None,
        max_query_len: int = 0,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of ragged query rows over paged KV, into ``out`` and ``lse``.

        max_query_len: no sequence has more rows than this; 0 = not known. It saves a launch.
        out, lse: contiguous, of query's shape and of its first two dimensions (float32); made here
            when not given (lse: left out).
        workspace: uint8 of ``attention_workspace_bytes``; made here when not given. A captured
            graph needs all three given.
        """
        self._check_batch(query, pages, block_tables, query_starts, context_lens, alibi_slopes)
        _require(math.isfinite(scale), "scale", f"must be finite, is {scale}")
        bad_window = f"must be from 0 to 2^31 - 1, is {sliding_window_tokens}"
        _require(0 <= sliding_window_tokens < 2**31, "sliding_window_tokens", bad_window)
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=self._device)
        self._check("out", out, tuple(query.shape), (query.dtype,))
        _require(out.is_contiguous(), "out", "must be contiguous")
        if lse is not None:
            self._check("lse", lse, tuple(query.shape[:2]), (torch.float32,))
            _require(lse.is_contiguous(), "lse", "must be contiguous")
        if workspace is None:
            num_bytes = self.attention_workspace_bytes(
                query, pages, block_tables, sliding_window_tokens=sliding_window_tokens
            )
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._check("workspace", workspace, (None,), (torch.uint8,))
        block_tables, query_starts = block_tables.contiguous(), query_starts.contiguous()
        context_lens = context_lens.contiguous()
        slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
        self._run(
            "paged_attention",
            query=self._view(query),
            out=out.data_ptr(),
            lse=0 if lse is None else lse.data_ptr(),
            pages=self._view(pages),
            block_tables=block_tables.data_ptr(),
            wide_block_tables=block_tables.dtype == torch.int64,
            max_blocks=block_tables.shape[1],
            query_starts=query_starts.data_ptr(),
            context_lens=context_lens.data_ptr(),
            num_sequences=context_lens.shape[0],
            alibi_slopes=0 if slopes is None else slopes.data_ptr(),
            scale=scale,
            sliding_window_tokens=sliding_window_tokens,
            max_query_len=max_query_len,
            split_tokens=self._split_tokens,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
            faults=self._faults.data_ptr(),
        )
        return out

    def attention_workspace_bytes(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        sliding_window_tokens: int = 0,
    ) -> int:
        """Bytes enough for every batch of these shapes, whatever its lengths."""
        num_bytes: int = self._call(
            "attention_workspace_bytes",
            query=self._view(query),
            pages=self._view(pages),
            max_blocks=block_tables.shape[1],
            num_sequences=block_tables.shape[0],
            sliding_window_tokens=sliding_window_tokens,
            split_tokens=self._split_tokens,
        )
        return num_bytes

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copies whole blocks inside a pool, in order. pairs: int64 [num_pairs, 2] on the host."""
        self._check_pool("pool", pool, self._device.type)
        self._copy("copy_blocks", pool, pool, pairs)

    def swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Copies whole blocks between the device and the host, in order; pinned memory is faster.

        pairs: int64 [num_pairs, 2] on the host.
        """
        self._check_pool("source", source, source.device.type)
        self._check_pool("destination", destination, destination.device.type)
        same = destination.dtype == source.dtype and destination.shape[1:] == source.shape[1:]
        _require(same, "destination", "must have source's layout and dtype")
        self._copy("swap_blocks", source, destination, pairs)

    def gather_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Copies blocks out of a pool, layer before block. block_ids: int64 on the host."""
        self._check_pool("pool", pool, self._device.type)
        _check_ids("block_ids", block_ids, 1)
        shape = (pool.shape[1], block_ids.shape[0], *pool.shape[2:])
        blocks = torch.empty(shape, dtype=pool.dtype, device=self._device)
        self._pack("gather_blocks", pool, block_ids, blocks)
        return blocks

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        """Copies blocks in: the inverse of ``gather_blocks``. Of equal ids the last one stays."""
        self._check_pool("pool", pool, self._device.type)
        _check_ids("block_ids", block_ids, 1)
        shape = (pool.shape[1], block_ids.shape[0], *pool.shape[2:])
        self._check("blocks", blocks, shape, (pool.dtype,))
        self._pack("scatter_blocks", pool, block_ids, blocks.contiguous())

    def check_faults(self) -> None:
        """Waits for the device. Raises InvalidRequestError for the first bad tensor since last."""
        faults = int(self._faults.item())
        self._faults.zero_()
        for name, (field, wanted) in _FAULTS.items():
            if faults & int(getattr(self._native, name)):
                raise InvalidRequestError(wanted, field=field)

    def _copy(
        self, name: str, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        _check_ids("pairs", pairs, 2)
        pairs = pairs.contiguous()
        self._run(
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
        )

    def _pack(
        self, name: str, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        block_ids = block_ids.contiguous()
        self._run(
            name,
            pool=pool.data_ptr(),
            blocks=blocks.data_ptr(),
            block_ids=block_ids.data_ptr(),
            num_block_ids=block_ids.shape[0],
            num_blocks=pool.shape[0],
            num_layers=pool.shape[1],
            block_bytes=pool.stride(0) * pool.element_size(),
            page_bytes=math.prod(pool.shape[2:]) * pool.element_size(),
        )

    def _run(self, name: str, **arguments: Any) -> None:
        """Puts a native operation on the current stream."""
        self._call(name, **arguments, stream=self._stream())

    def _call(self, name: str, **arguments: Any) -> Any:
        """Calls a native function; a bad id or size comes back as "<name> must ..."."""
        try:
            return getattr(self._native, name)(**arguments)
        except IndexError as error:
            field, _, wanted = str(error).partition(" must ")
            raise InvalidRequestError(f"must {wanted}", field=field) from None

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream

    def _view(self, tensor: torch.Tensor) -> Any:
        return self._native.TensorView(
            tensor.data_ptr(), self._dtypes[tensor.dtype], tensor.shape, tensor.stride()
        )

    def _check_batch(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
    ) -> None:
        num_kv_heads, head_size = self._check_pages(pages)
        self._check("query", query, (None, None, head_size), _FLOATS)
        _check_last_stride("query", query)
        num_heads = query.shape[1]
        _require(num_heads >= 1 and num_heads % num_kv_heads == 0, "query", "must group KV heads")
        self._check("context_lens", context_lens, (None,), (torch.int64,))
        num_sequences = context_lens.shape[0]
        self._check("query_starts", query_starts, (num_sequences + 1,), (torch.int64,))
        wanted = (torch.int32, torch.int64)
        self._check("block_tables", block_tables, (num_sequences, None), wanted)
        if alibi_slopes is not None:
            self._check("alibi_slopes", alibi_slopes, (num_heads,), (torch.float32,))

    def _check_pages(self, pages: torch.Tensor) -> tuple[int, int]:
        """Returns num_kv_heads and head_size."""
        self._check("pages", pages, (None, 2, None, None, None), _FLOATS)
        _check_last_stride("pages", pages)
        _check_geometry("pages", pages)
        return pages.shape[2], pages.shape[4]

    def _check_pool(self, name: str, pool: torch.Tensor, device: str) -> None:
        _check_tensor(name, pool, (None, None, 2, None, None, None), _FLOATS, device)
        _check_geometry(name, pool)
        together = pool.shape[0] == 0 or pool[0].is_contiguous()
        _require(together, name, "must keep the bytes of a block together")

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int | None, ...],
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        _check_tensor(name, tensor, shape, dtypes, self._device.type)


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: str,
) -> None:
    """``shape``: None where any number will do."""
    _require(isinstance(tensor, torch.Tensor), name, f"must be a tensor, is {type(tensor)}")
    on_device = tensor.device.type == device and tensor.layout == torch.strided
    _require(on_device, name, f"must be dense and on {device}, is on {tensor.device}")
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, has) for wanted, has in zip(shape, tensor.shape, strict=True)
    )
    _require(fits, name, f"must be {list(shape)}, is {list(tensor.shape)}")
    _require(tensor.dtype in dtypes, name, f"must be of {dtypes}, is of {tensor.dtype}")


def _check_geometry(name: str, tensor: torch.Tensor) -> None:
    _, num_kv_heads, block_size, head_size = tensor.shape[-4:]
    _require(num_kv_heads >= 1 and block_size >= 1, name, "must hold at least one head and token")
    good = head_size % 8 == 0 and 8 <= head_size <= MAX_HEAD_SIZE
    wanted = f"must have a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}"
    _require(good, name, f"{wanted}, has {head_size}")


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    dense = tensor.stride(-1) == 1 or tensor.numel() == 0
    _require(dense, name, f"must be contiguous in the last dimension, has {tensor.stride()}")


def _check_ids(name: str, ids: torch.Tensor, rank: int) -> None:
    _check_tensor(name, ids, (None, 2)[:rank], (torch.int64,), "cpu")


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message, field=field)
