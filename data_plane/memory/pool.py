"""The memory: one tensor for each tier.

    pool   [num_blocks, num_layers, 2, num_kv_heads, block_size_tokens, head_size]
             block      layer   K, V

A block is contiguous over all its layers, so that a swap or a copy of it is one memcpy; a layer's
pages are the strided view ``pool[:, layer]``. Both tiers have this form. Nothing is filled: a slot
that was never written holds what the memory held, until its block goes to another tenant
(``data_plane/plans/last_tenants.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

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
MAX_HEAD_SIZE = 256
"""The largest head that the kernels compute with; layouts may name larger ones."""
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
        """Allocate both tiers, which live until ``drain`` has waited for the device.

        Raises InvalidRequestError for counts out of range and for heads that the kernels do not
        compute with, and NeverFitsError for a tier that the GPU, or the host beside it, has no
        room for.
        """
        if num_device_blocks < 1:
            raise InvalidRequestError("must be at least 1", field="num_device_blocks")
        if num_host_blocks < 0:
            raise InvalidRequestError("must be at least 0", field="num_host_blocks")
        head_size = only_group(layout).head_size
        if head_size > MAX_HEAD_SIZE:
            raise InvalidRequestError(
                f"this data plane's kernels compute with heads of up to {MAX_HEAD_SIZE} elements, "
                f"the layout's have {head_size}",
                field="layout.groups[0].head_size",
            )
        page = (
            len(shard.layers(layout)),
            2,
            shard.num_kv_heads,
            layout.block_size_tokens,
            head_size,
        )
        dtype = TORCH_DTYPES[layout.kv_dtype]
        device_shape, host_shape = (num_device_blocks, *page), (num_host_blocks, *page)
        if device.type == "cpu":
            self.host_tier, unpin = huge_pages.empty(host_shape, dtype), _nothing
        else:
            self.host_tier, unpin = pinned.empty(host_shape, dtype, device, "num_host_blocks")
        # Runs while the tiers are still there: an object's members go after it.
        weakref.finalize(self, _let_go, drain, unpin).atexit = False
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
        """The pool of ``tier`` (a ``pb.Tier``), shaped as the module says."""
        return self.device_tier if tier == pb.TIER_DEVICE else self.host_tier

    def pages(self, layer_index: int) -> torch.Tensor:
        """One layer's device pages [num_blocks, 2, num_kv_heads, block_size_tokens, head_size], a
        view.
        """
        return self.device_tier[:, layer_index]


def _let_go(drain: Callable[[], None], unpin: Callable[[], None]) -> None:
    """What the device still does with the tiers comes first. One that failed does nothing."""
    with suppress(InternalError):
        drain()
    unpin()


def _nothing() -> None:
    return None


def _on_gpu(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise NeverFitsError(f"not on {device}: {error}", field="num_device_blocks") from error
