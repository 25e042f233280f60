"""Passes a layer's tensors and its output through memory shared with the data plane: the GPU's
where the data plane runs on the tensors' GPU, otherwise main memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from kvplane.attention_options import AttentionOptions
from kvplane.execution.shard_execution import ShardExecution
from kvplane.results import Signed
from kvplane.runtime.device_region import DeviceRegion, gpu_of, open_region
from kvplane.tensor import Tensor
from kvplane.transport.local.connection import LocalConnection
from kvplane.transport.local.layer import LocalLayer, Shape
from kvplane.transport.local.packets import MAX_BINDINGS
from kvplane.wire.v1.types_pb2 import SignedPayload


@dataclass(frozen=True, slots=True)
class _Bound:
    """A layer that the data plane has bound for tensors of these shapes: views of a region."""

    region: DeviceRegion | None
    """The region, if it is on the GPU; None for main memory."""
    layer: LocalLayer
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    output: torch.Tensor
    call: Any
    """The layer as native code runs it; None where there is no native code."""


class RegionLayers:
    """Runs layers of one shard's execution through shared memory. Raises as ``Execution.layer``."""

    def __init__(self, execution: ShardExecution) -> None:
        self._execution = execution
        self._local: LocalConnection | None = None
        # Requested regions by GPU, each requested once; at most one is not None.
        self._regions: dict[int, DeviceRegion | None] = {}
        self._bound: dict[tuple[object, ...], _Bound] = {}
        # The last call of each layer: comparing is faster than hashing.
        self._latest: dict[int, tuple[tuple[object, ...], _Bound]] = {}

    def begin(self, plan: Signed, num_tokens: int, pass_index: int | None = None) -> bool:
        """Start a plan as ``Execution.begin``, without an event loop; False where it needs one."""
        return self._execution.begin_local(cast(SignedPayload, plan), num_tokens, pass_index)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        options: AttentionOptions,
    ) -> torch.Tensor | None:
        """Run a layer. Returns the output, on the query's device, or None if the layer has to go
        over gRPC, as layers that keep latents and those with a mask of blocks do.
        """
        if value is None or options.seen_blocks is not None:
            return None
        bound = self._find(index, query, key, value, options)
        if bound is None:
            return None
        tensors, region = (query, key, value), bound.region
        if bound.call is not None and all(t.is_cpu and t.is_contiguous() for t in tensors):
            output = torch.empty(bound.output.shape, dtype=query.dtype)
            addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()
            was_moved = self._execution.layer_local(bound.layer, bound.call, addresses)
            if was_moved is None:
                return None
            return output if was_moved else output.copy_(bound.output)
        if region is not None:
            region.follow()
        for there, tensor in zip(bound.inputs, tensors, strict=True):
            there.copy_(tensor)
        if region is not None:
            region.settle()
        if self._execution.layer_local(bound.layer) is None:
            return None
        # A copy: the next layer's output overwrites it.
        return bound.output.to(query.device, copy=True)

    def _find(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> _Bound | None:
        """Return the bound layer, bound now if it was not; None if it cannot be."""
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
        bound = self._bound.get(identity)
        if bound is None:
            if len(self._bound) >= MAX_BINDINGS:
                self._bound.clear()
                self._latest.clear()
            region, binding = self._region_of(query), len(self._bound)
            bound = _make(local, region, index, query, key, value, options, binding)
            if bound is None or not self._execution.bind_local(bound.layer):
                return None
            self._bound[identity] = bound
        self._latest[index] = identity, bound
        return bound

    def _region_of(self, tensor: torch.Tensor) -> DeviceRegion | None:
        gpu = gpu_of(tensor)
        if gpu is None:
            return None
        if gpu not in self._regions:
            self._regions[gpu] = open_region(self._execution, gpu)
        return self._regions[gpu]

    def _forget(self) -> None:
        """Drop the references to the regions and their views."""
        self._local = None
        self._regions.clear()
        self._bound.clear()
        self._latest.clear()


def _make(
    local: LocalConnection,
    region: DeviceRegion | None,
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    binding: int,
) -> _Bound | None:
    of_query, of_key, of_value = (tuple(tensor.shape) for tensor in (query, key, value))
    dtype = str(query.dtype).removeprefix("torch.")
    make = LocalLayer.make
    layer = make(region or local, index, dtype, of_query, of_key, of_value, options, binding)
    if layer is None or layer.query is None or layer.output is None:
        return None
    whole = torch.frombuffer(local.memory, dtype=torch.uint8) if region is None else region.whole

    def view(there: tuple[int, Shape]) -> torch.Tensor:
        offset, shape = there
        num_bytes = Tensor.size_bytes(dtype, shape)
        return whole[offset : offset + num_bytes].view(query.dtype).view(shape)

    inputs = view(layer.query), view(layer.key), view(layer.value)
    call = layer.native(local) if region is None else None
    return _Bound(region, layer, inputs, view(layer.output), call)
