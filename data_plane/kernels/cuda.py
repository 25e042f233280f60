"""The kernels on a GPU (csrc/cuda), or emulated: calls are queued on a stream and not waited for.

The native module is an argument: ``kvplane_kernels._cuda``, or the emulator's. Ids of blocks to
copy are on the host and are checked by the call; what is in device memory is checked by the
kernels, and ``check_faults`` reports what they found.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments, check_result, require
from data_plane.kernels.cuda_streams import HostStreams, Streams
from data_plane.kernels.native import NativeKernels
from kvplane.errors import InvalidRequestError

_FAULTS: Final = {
    "BAD_BLOCK_TABLES": (
        "block_tables",
        "must hold ids of the pages' blocks wherever a query token attends",
    ),
    "BAD_QUERY_STARTS": (
        "query_starts",
        "must ascend from 0 to num_tokens, by max_query_len at most",
    ),
    "BAD_CONTEXT_LENS": (
        "context_lens",
        "must cover the sequence's query tokens and fit its table",
    ),
    "BAD_SLOTS": ("slots", "must be slots of the pages"),
    "BAD_KEY_SCALES": ("key_scales", "must be finite and above 0"),
    "BAD_VALUE_SCALES": ("value_scales", "must be finite and above 0"),
}
MAX_HEAD_SIZE: Final = 256
_FINDING_FAULTS: Final = ("reshape_and_cache", "paged_attention")


class CudaKernels(NativeKernels):
    """The operations of ``data_plane.kernels.backend.Kernels`` on one GPU. Of tokens with equal
    slots, any one may be stored.

    module: the compiled one. device: of all tensors but pairs and block_ids.
    streams: those of the device; the emulator needs none.
    split_tokens: the context of a short query is split at multiples of it; a multiple of 64. The
        rounding of a result depends on it, and on nothing else in a batch.
    """

    backend = "cuda"

    def __init__(
        self,
        module: ModuleType,
        device: torch.device,
        *,
        streams: Streams | None = None,
        split_tokens: int = 512,
    ) -> None:
        super().__init__(module, device)
        self.streams = streams if streams is not None else HostStreams()
        self.detail = ""
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            self.detail = f'device="{gpu.name}" arch=sm_{gpu.major}{gpu.minor}'
        self._split_tokens = split_tokens
        self._faults = torch.zeros(1, dtype=torch.int32, device=device)

    def paged_attention(
        self,
        arguments: AttentionArguments,
        *,
        lse: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``out``: of query's shape and dtype, contiguous. ``workspace``: uint8 [num_bytes], of at
        least ``attention_workspace_bytes``. Either is allocated if not given; a captured graph
        needs both, and ``arguments`` made before the capture.
        """
        _check_served(arguments)
        if workspace is None:
            num_bytes = self.attention_workspace_bytes(arguments)
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        else:
            check_result("workspace", workspace, (None,), torch.uint8, self.device)
        return self._attend(
            arguments,
            out,
            lse,
            max_query_len=arguments.max_query_len,
            split_tokens=self._split_tokens,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )

    def reshape_and_cache(self, arguments: WriteArguments) -> None:
        _check_pages(arguments.keys, arguments.values)
        super().reshape_and_cache(arguments)

    def attention_workspace_bytes(self, arguments: AttentionArguments) -> int:
        """Enough bytes for every batch of these shapes and this window, whatever its lengths."""
        num_bytes: int = super()._call(
            "attention_workspace_bytes",
            query=self._view(arguments.query),
            pages=self._pages(arguments),
            max_blocks=arguments.block_tables.shape[1],
            num_sequences=arguments.block_tables.shape[0],
            sliding_window_tokens=arguments.options.sliding_window_tokens,
            split_tokens=self._split_tokens,
        )
        return num_bytes

    def check_faults(self) -> None:
        faults = int(self._faults.item())
        if faults:
            self._faults.zero_()
        for name, (field, wanted) in _FAULTS.items():
            if faults & int(getattr(self._module, name)):
                raise InvalidRequestError(wanted, field=field)

    def _call(self, name: str, **arguments: Any) -> Any:
        """Call on the caller's stream, with the device as the current one."""
        if name in _FINDING_FAULTS:
            arguments["faults"] = self._faults.data_ptr()
        if self.device.type != "cuda":
            return super()._call(name, stream=0, **arguments)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            return super()._call(name, stream=stream, **arguments)


def _check_served(arguments: AttentionArguments) -> None:
    _check_pages(arguments.keys, arguments.values)
    for name in ("logit_soft_cap", "sinks"):
        none = not getattr(arguments.options, name)
        require(none, "is not served by the kernels on a GPU", f"options.{name}")


def _check_pages(keys: torch.Tensor, values: torch.Tensor) -> None:
    equal = keys.shape == values.shape and keys.stride() == values.stride()
    require(equal, "must have values of the keys' size on a GPU", "pages")
    most = MAX_HEAD_SIZE
    require(keys.shape[3] <= most, f"must have heads of at most {most} elements on a GPU", "pages")
