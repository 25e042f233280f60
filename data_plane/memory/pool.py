"""The memory: one tensor for each tier.

    pool   [num_blocks, num_layers, 2, num_kv_heads, block_size_tokens, head_size]
             block      layer   K, V
    or, where values are smaller than keys,
           [num_blocks, num_layers, page_elements]: a page's keys and then its values

A block is contiguous over all its layers, so that a swap or a copy of it is one memcpy; a layer's
pages are the strided view ``pool[:, layer]``. Both tiers have this shape. The memory is not
initialized; a block is zeroed before another tenant gets it (``data_plane/plans/last_tenants.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from data_plane.kernels.pages import PageShape
from data_plane.memory import huge_pages, pinned
from kvplane.errors import InternalError, InvalidRequestError, NeverFitsError
from kvplane.layout import Layout
from kvplane.shard import Shard, only_group
from kvplane.v1 import types_pb2 as pb

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
TIER_NAMES = {pb.TIER_DEVICE: "device", pb.TIER_HOST: "host"}


class Pools:
    """The device and the host tier of one shard."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        drain: Callable[[], None],
    ) -> None:
        """Allocate both tiers. ``drain`` waits for the device; it is called before they are freed.

        Raises InvalidRequestError for counts out of range, and NeverFitsError for a tier that does
        not fit in the memory of the GPU, or of the host beside it.
        """
        if num_device_blocks < 1:
            raise InvalidRequestError("must be at least 1", field="num_device_blocks")
        if num_host_blocks < 0:
            raise InvalidRequestError("must be at least 0", field="num_host_blocks")
        self.page = PageShape(only_group(layout), shard.num_kv_heads, layout.block_size_tokens)
        page = (len(shard.layers(layout)), *self.page.extents)
        dtype = TORCH_DTYPES[layout.kv_dtype]
        device_shape, host_shape = (num_device_blocks, *page), (num_host_blocks, *page)
        if device.type == "cpu":
            self.host_tier, unpin = huge_pages.empty(host_shape, dtype), _nothing
        else:
            self.host_tier, unpin = pinned.empty(host_shape, dtype, device, "num_host_blocks")
        # Runs before the tiers are freed: an object's members outlive its finalizers.
        weakref.finalize(self, _release, drain, unpin).atexit = False
        if device.type == "cpu":
            self.device_tier = huge_pages.empty(device_shape, dtype)
        else:
            self.device_tier = _on_gpu(device_shape, dtype, device)

    @property
    def num_blocks(self) -> dict[pb.Tier, int]:
        """Blocks of each tier."""
        return {tier: self.tier(tier).shape[0] for tier in TIER_NAMES}

    @property
    def num_bytes(self) -> dict[pb.Tier, int]:
        """Bytes of each tier."""
        return {tier: self.tier(tier).nbytes for tier in TIER_NAMES}

    def tier(self, tier: pb.Tier) -> torch.Tensor:
        """The tensor of a tier, shaped as described at the top of this file."""
        return self.device_tier if tier == pb.TIER_DEVICE else self.host_tier

    def pages(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's device pages: views of its keys [num_blocks, num_kv_heads, block_size_tokens,
        head_size], and of its values.
        """
        return self.page.split(self.device_tier[:, layer_index])


def _release(drain: Callable[[], None], unpin: Callable[[], None]) -> None:
    """Wait for what the device still does with the tiers, unless it failed; then unpin."""
    with suppress(InternalError):
        drain()
    unpin()


def _nothing() -> None:
    return None


def _on_gpu(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise NeverFitsError(
            f"the device tier does not fit on {device}: {error}", field="num_device_blocks"
        ) from error
