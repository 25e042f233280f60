"""The operations as calls of a native module: the common part of the CPU and CUDA kernels.

Native functions take addresses, sizes and strides. Tensors are checked by
``data_plane.kernels.arguments`` before their addresses are passed, and live until the call returns.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Final

import torch

from data_plane.kernels import arguments as checks
from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.step_rows import StepRows
from data_plane.memory.upload import upload
from kvplane.errors import InvalidRequestError

_DTYPES: Final = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8_E4M3",
    torch.float8_e5m2: "FLOAT8_E5M2",
}


class NativeKernels:
    """The kernels as functions of one native module, on tensors of one device;
    ``data_plane.kernels.backend.Kernels`` describes them.
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self.device = device
        self._module = module
        self._dtypes = {dtype: module.Dtype.__members__[name] for dtype, name in _DTYPES.items()}

    def reshape_and_cache(self, arguments: WriteArguments) -> None:
        a = arguments
        self._check_own("pages", a.keys)
        self._call(
            "reshape_and_cache",
            key=self._view(a.key),
            value=self._view_of_value(a),
            pages=self._pages(a),
            scales=self._scales(a),
            slots=a.slots.data_ptr(),
        )

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        checks.check_pool("pool", pool, self.device)
        checks.check_pairs(pairs)
        self._copy("copy_blocks", pool, pool, pairs)

    def swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        checks.check_swap(source, destination, pairs, self.device)
        self._copy("swap_blocks", source, destination, pairs)

    def gather_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        checks.check_pool("pool", pool, self.device)
        shape = checks.shape_of_blocks(pool, block_ids)
        blocks = torch.empty(shape, dtype=pool.dtype, device=pool.device)
        self._pack("gather_blocks", pool, block_ids, blocks)
        return blocks

    def scatter_blocks(
        self, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        checks.check_pool("pool", pool, self.device)
        checks.check_blocks(blocks, checks.shape_of_blocks(pool, block_ids), pool)
        self._pack("scatter_blocks", pool, block_ids, blocks.contiguous())

    def clear_blocks(self, pool: torch.Tensor, block_ids: torch.Tensor) -> None:
        checks.check_pool("pool", pool, self.device)
        checks.shape_of_blocks(pool, block_ids)
        # As 8-byte integers, whatever the dtype: head sizes are multiples of 8 elements.
        words = pool.view(torch.int64).flatten(1)
        if self.device.type == "cpu":
            # Torch would wake all of its threads for each block.
            words.numpy()[block_ids.numpy()] = 0
        else:
            words.index_fill_(0, upload([block_ids], self.device)[0], 0)

    def _attend(
        self,
        arguments: AttentionArguments,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        **more: Any,
    ) -> torch.Tensor:
        a = arguments
        self._check_own("pages", a.keys)
        if out is None:
            out = torch.empty(a.output_shape, dtype=a.query.dtype, device=a.query.device)
        else:
            checks.check_result("out", out, a.output_shape, a.query.dtype, a.keys.device)
        if lse is not None:
            checks.check_result("lse", lse, a.query.shape[:2], torch.float32, a.keys.device)
        self._call(
            "paged_attention",
            query=self._view(a.query),
            out=out.data_ptr(),
            lse=_address(lse),
            pages=self._pages(a),
            scales=self._scales(a),
            **self.batch_arguments(a),
            options=self._options(a),
            **more,
        )
        return out

    def batch_arguments(self, a: AttentionArguments | StepRows) -> dict[str, Any]:
        """Return the arguments of native functions that describe a batch's tables and lengths."""
        return {
            "block_tables": a.block_tables.data_ptr(),
            "wide_block_tables": a.block_tables.dtype == torch.int64,
            "max_blocks": a.block_tables.shape[1],
            "query_starts": a.query_starts.data_ptr(),
            "context_lens": a.context_lens.data_ptr(),
            "num_sequences": a.context_lens.shape[0],
        }

    def _bound_layer(self, write: WriteArguments, attention: AttentionArguments) -> Any:
        """Make the module's BoundLayer for later calls whose tensors are like these."""
        return self._module.BoundLayer(
            query=self._view(attention.query),
            key=self._view(write.key),
            value=self._view_of_value(write),
            pages=self._pages(attention),
            scales=self._scales(attention),
            options=self._options(attention),
        )

    def _copy(
        self, name: str, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
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
        )

    def _pack(
        self, name: str, pool: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor
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
        )

    def _call(self, name: str, **arguments: Any) -> Any:
        """Call a native function; raises InvalidRequestError for a bad id or length."""
        try:
            return getattr(self._module, name)(**arguments)
        except IndexError as error:
            field, _, wanted = str(error).partition(" must ")
            raise InvalidRequestError(f"must {wanted}", field=field) from None

    def _check_own(self, name: str, tensor: torch.Tensor) -> None:
        if not checks.is_on(tensor, self.device):
            raise InvalidRequestError(
                f"must be on {self.device}, is on {tensor.device}", field=name
            )

    def _view(self, tensor: torch.Tensor) -> Any:
        return self._module.TensorView(
            tensor.data_ptr(), self._dtypes[tensor.dtype], tensor.shape, tensor.stride()
        )

    def _view_of_value(self, arguments: WriteArguments) -> Any:
        return None if arguments.value is None else self._view(arguments.value)

    def _pages(self, arguments: WriteArguments | AttentionArguments) -> Any:
        return self._module.PagesView(self._view(arguments.keys), self._view(arguments.values))

    def _options(self, arguments: AttentionArguments) -> Any:
        a, options = arguments, arguments.options
        return self._module.AttentionOptions(
            scale=options.scale or 1.0 / math.sqrt(a.query.shape[2]),
            sliding_window_tokens=options.sliding_window_tokens,
            alibi_slopes=_address(a.slopes),
            logit_soft_cap=options.logit_soft_cap,
            sinks=_address(a.sinks),
            **_seen_blocks(a),
        )

    def _scales(self, arguments: WriteArguments | AttentionArguments) -> Any:
        key, value = arguments.key_scales, arguments.value_scales
        strides = [0 if t is None or len(t) == 1 else t.stride(0) for t in (key, value)]
        return self._module.ScalesView(_address(key), _address(value), *strides)


def _seen_blocks(arguments: AttentionArguments) -> dict[str, int]:
    """Return the native options that describe a mask of blocks; none where there is no mask."""
    pattern, seen = arguments.options.block_pattern, arguments.seen_blocks
    if pattern is None or seen is None:
        return {}
    return {
        "seen_blocks": seen.data_ptr(),
        "seen_stride": seen.stride(0) if arguments.options.seen_blocks is not None else 0,
        "num_seen_blocks": seen.shape[2],
        "block_tokens": pattern.block_tokens,
        "local_blocks": pattern.local_blocks,
    }


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
