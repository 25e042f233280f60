"""The functions of ``data_plane.kernels.cpu`` on a GPU's tensors, or emulated.

The native module is an argument: ``kvplane_kernels._cuda``, or the emulator's. Calls are put on a
stream and not waited for. Ids of blocks to copy stay on the host and are checked at the call; what
only the device can read is checked there, and ``check_faults`` says what it found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

import torch

from data_plane.kernels.arguments import NativeCalls
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

_FAULTS: Final = {
    "BAD_BLOCK_TABLES": ("block_tables", "must name blocks of the pages wherever a row looks"),
    "BAD_QUERY_STARTS": (
        "query_starts",
        "must rise from 0 to num_tokens, by max_query_len at most",
    ),
    "BAD_CONTEXT_LENS": ("context_lens", "must cover the sequence's rows and fit its table"),
    "BAD_SLOTS": ("slots", "must be slots of the pages"),
    "BAD_KEY_SCALES": ("key_scales", "must be finite and above 0"),
    "BAD_VALUE_SCALES": ("value_scales", "must be finite and above 0"),
}


class DeviceKernels:
    """The operations on one device. Shapes and meanings are those of ``data_plane.kernels.cpu``.

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
        self._calls = NativeCalls(native, device)
        self._faults = torch.zeros(1, dtype=torch.int32, device=device)

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        *,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        """Writes each token's key and value into its slot; of equal slots, either may stay."""
        with self._stream() as stream:
            self._calls.reshape_and_cache(
                key,
                value,
                pages,
                slots,
                key_scales,
                value_scales,
                faults=self._faults.data_ptr(),
                stream=stream,
            )

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        options: AttentionOptions = AttentionOptions(),
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
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
        self._calls.check_attention(
            query,
            pages,
            block_tables,
            query_starts,
            context_lens,
            options,
        )
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=self._device)
        if workspace is None:
            num_bytes = self.attention_workspace_bytes(query, pages, block_tables, options)
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._calls.check_result("workspace", workspace, (None,), torch.uint8)
        with self._stream() as stream:
            self._calls.paged_attention(
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
                max_query_len=max_query_len,
                split_tokens=self._split_tokens,
                workspace=workspace.data_ptr(),
                workspace_bytes=workspace.numel(),
                faults=self._faults.data_ptr(),
                stream=stream,
            )
        return out

    def attention_workspace_bytes(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        block_tables: torch.Tensor,
        options: AttentionOptions = AttentionOptions(),
    ) -> int:
        """Bytes enough for every batch of these shapes, whatever its lengths."""
        return self._calls.attention_workspace_bytes(
            query,
            pages,
            block_tables,
            sliding_window_tokens=options.sliding_window_tokens,
            split_tokens=self._split_tokens,
        )

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copies whole blocks inside a pool, in order. pairs: int64 [num_pairs, 2] on the host."""
        with self._stream() as stream:
            self._calls.copy_blocks(pool, pairs, stream=stream)

    def swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Copies whole blocks between the device and the host, in order; pinned memory is faster.

        pairs: int64 [num_pairs, 2] on the host.
        """
        with self._stream() as stream:
            self._calls.swap_blocks(source, destination, pairs, stream=stream)

    def gather_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Copies blocks out of a pool, layer before block. block_ids: int64 on the host."""
        with self._stream() as stream:
            return self._calls.gather_blocks(pool, block_ids, stream=stream)

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        """Copies blocks in: the inverse of ``gather_blocks``. Of equal ids the last one stays."""
        with self._stream() as stream:
            self._calls.scatter_blocks(pool, block_ids, blocks, stream=stream)

    def check_faults(self) -> None:
        """Waits for the caller's stream. Raises InvalidRequestError for the first bad tensor since
        last.
        """
        faults = int(self._faults.item())
        if faults:
            self._faults.zero_()
        for name, (field, wanted) in _FAULTS.items():
            if faults & int(getattr(self._native, name)):
                raise InvalidRequestError(wanted, field=field)

    @contextmanager
    def _stream(self) -> Iterator[int]:
        """The caller's stream of the device, which is the current one inside."""
        if self._device.type != "cuda":
            yield 0
            return
        with torch.cuda.device(self._device):
            yield torch.cuda.current_stream(self._device).cuda_stream
