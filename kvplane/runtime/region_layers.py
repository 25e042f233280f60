"""Passes a layer's tensors and its output through memory shared with the data plane: the GPU's
where the data plane runs on the tensors' GPU, otherwise main memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from kvplane.attention_options import AttentionOptions
from kvplane.execution.shard_execution import ShardExecution
from kvplane.results import Signed
from kvplane.runtime.device_region import DeviceRegion, gpu_of, open_region
from kvplane.tensor import Tensor
from kvplane.transport.local.connection import LocalConnection
from kvplane.transport.local.layer import LocalLayer, Shape
from kvplane.wire.v1.types_pb2 import SignedPayload

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_MAX_KNOWN: Final = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    """A layer that was computed before, with tensors of these shapes: views of the region."""

    region: DeviceRegion | None
    """The region on the GPU; None for main memory."""
    layer: LocalLayer
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    output: torch.Tensor
    call: Any
    """The layer for native code; None where there is none."""


class RegionLayers:
    """The layers of an execution of one shard. Raises what ``Execution.layer`` raises."""

    def __init__(self, execution: ShardExecution) -> None:
        self._execution = execution
        self._local: LocalConnection | None = None
        # Requested regions by GPU, each requested once; at most one is not None.
        self._regions: dict[int, DeviceRegion | None] = {}
        self._known: dict[tuple[object, ...], _Known | None] = {}
        # The last call of each layer: comparing is faster than hashing.
        self._latest: dict[int, tuple[tuple[object, ...], _Known | None]] = {}

    def begin(self, plan: Signed, num_tokens: int, pass_index: int | None = None) -> bool:
        """``Execution.begin`` without an event loop; False where it needs one."""
        return self._execution.begin_now(cast(SignedPayload, plan), num_tokens, pass_index)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        options: AttentionOptions,
    ) -> torch.Tensor | None:
        """Return the output, on the query's device, or None if the layer has to go over gRPC, as
        latents do.
        """
        if value is None:
            return None
        known = self._find(index, query, key, value, options)
        if known is None:
            return None
        tensors = query, key, value
        region = known.region
        if known.call is not None and all(t.is_cpu and t.is_contiguous() for t in tensors):
            output = torch.empty(known.output.shape, dtype=query.dtype)
            addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
            was_moved = self._execution.call_now(known.layer, known.call, addresses)
            if was_moved is None:
                return None
            return output if was_moved else output.copy_(known.output)
        if region is not None:
            region.follow()
        for there, tensor in zip(known.inputs, tensors, strict=True):
            there.copy_(tensor)
        if region is not None:
            region.settle()
        if not self._execution.layer_now(known.layer):
            return None
        # A copy: the next layer's output overwrites it.
        return known.output.to(query.device, copy=True)

    def _find(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> _Known | None:
        local = self._execution.local
        if local is not self._local:
            self._forget()
            self._local = local
            if local is not None:
                local.at_end(self._forget)
        if local is None or not query.dtype == key.dtype == value.dtype:
            return None
        identity = index, query.dtype, query.device, query.shape, key.shape, value.shape, options
        latest = self._latest.get(index)
        if latest is not None and latest[0] == identity:
            return latest[1]
        if identity not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            region = self._region_of(query)
            self._known[identity] = _make(local, region, index, query, key, value, options)
        known = self._known[identity]
        self._latest[index] = identity, known
        return known

    def _region_of(self, tensor: torch.Tensor) -> DeviceRegion | None:
        gpu = gpu_of(tensor)
        if gpu is None:
            return None
        if gpu not in self._regions:
            self._regions[gpu] = open_region(self._execution, gpu)
        return self._regions[gpu]

    def _forget(self) -> None:
        """Drop the regions and their views."""
        self._local = None
        self._regions.clear()
        self._known.clear()
        self._latest.clear()


def _make(
    local: LocalConnection,
    region: DeviceRegion | None,
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> _Known | None:
    of_query, of_key, of_value = (tuple(tensor.shape) for tensor in (query, key, value))
    dtype = NAMES[query.dtype]
    make = LocalLayer.make
    layer = make(region or local, index, dtype, of_query, of_key, of_value, options)
    if layer is None or layer.query is None or layer.output is None:
        return None
    whole = torch.frombuffer(local.memory, dtype=torch.uint8) if region is None else region.whole

    def view(there: tuple[int, Shape]) -> torch.Tensor:
        offset, shape = there
        num_bytes = Tensor.size_bytes(dtype, shape)
        return whole[offset : offset + num_bytes].view(query.dtype).view(shape)

    inputs = view(layer.query), view(layer.key), view(layer.value)
    call = layer.native(local) if region is None else None
    return _Known(region, layer, inputs, view(layer.output), call)
