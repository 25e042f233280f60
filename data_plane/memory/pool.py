"""The memory: one tensor for each tier of each layer group.

    pool   [num_blocks, num_layers, 2, num_kv_heads, block_size_tokens, head_size]
             block      layer   K, V
    or, where values are smaller than keys, or only latents are stored,
           [num_blocks, num_layers, page_elements]: a page's keys and then its values, if any
    or, of states,
           [num_blocks, num_layers, page_bytes], uint8

A block is contiguous over all its layers, so that a swap or a copy of it is one memcpy; a layer's
pages are the strided view ``pool[:, layer]``. Both tiers of a group have this shape. The memory is
not initialized; a block is zeroed before another tenant gets it
(``data_plane/plans/contents/last_tenants.py``).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from data_plane.memory import huge_pages
from data_plane.memory.pages import PageShape
from data_plane.memory.sizing import free_bytes
from data_plane.tier_keys import TierKey, group_of, in_groups, tier_key_of, tier_keys_of
from kvplane.errors import InternalError, InvalidRequestError, NeverFitsError
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.wire.v1 import types_pb2 as pb

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
}
TIER_NAMES = {pb.TIER_DEVICE: "device", pb.TIER_HOST: "host"}


_FOR_ALL_GPUS: Final = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels copy from it


class Pools:
    """The memory of one shard: a device and a host tier for each layer group."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        *,
        num_device_blocks: int | Sequence[int],
        num_host_blocks: int | Sequence[int],
        device: torch.device,
        drain: Callable[[], None],
    ) -> None:
        """Allocate all tiers. ``num_device_blocks`` and ``num_host_blocks``: of each layer group;
        a single number is for each of them. ``drain`` waits for the device; it is called before
        the tiers are freed.

        Raises InvalidRequestError for counts out of range, and NeverFitsError for a tier that does
        not fit in the memory of the GPU, or of the host beside it.
        """
        of_device = in_groups(num_device_blocks, layout)
        of_host = in_groups(num_host_blocks, layout)
        for name, counts, least in (
            ("num_device_blocks", of_device, 1),
            ("num_host_blocks", of_host, 0),
        ):
            if len(counts) != len(layout.groups):
                raise InvalidRequestError("must be one for each layer group", field=name)
            if min(counts) < least:
                raise InvalidRequestError(f"must be at least {least}", field=name)
        self.page_shapes = [
            PageShape(group, len(shard.kv_heads(layout, i)), layout.block_size_tokens)
            for i, group in enumerate(layout.groups)
        ]
        dtypes = [TORCH_DTYPES[layout.stored_dtype(i)] for i in range(len(layout.groups))]
        pages = [
            (len(shard.group_layers(layout, i)), *page.extents)
            for i, page in enumerate(self.page_shapes)
        ]
        self._tiers: dict[TierKey, torch.Tensor] = {}
        unpins: list[Callable[[], None]] = []
        # Runs before the tiers are freed: an object's members outlive its finalizers.
        weakref.finalize(self, _release, drain, unpins).atexit = False
        for group, (page, dtype) in enumerate(zip(pages, dtypes, strict=True)):
            shape = (of_host[group], *page)
            if device.type == "cpu":
                host_tier = huge_pages.empty(shape, dtype)
            else:
                host_tier, unpin = empty_pinned(shape, dtype, device, "num_host_blocks")
                unpins.append(unpin)
            self._tiers[tier_key_of(group, pb.TIER_HOST)] = host_tier
        for group, (page, dtype) in enumerate(zip(pages, dtypes, strict=True)):
            shape = (of_device[group], *page)
            make = huge_pages.empty if device.type == "cpu" else partial(_on_gpu, device=device)
            self._tiers[tier_key_of(group, pb.TIER_DEVICE)] = make(shape, dtype)
        self._tiers = {tier_key: self._tiers[tier_key] for tier_key in tier_keys_of(layout)}
        # By index of a layer in the shard.
        self._pages = []
        for layer in shard.layers(layout):
            group = next(i for i, g in enumerate(layout.groups) if layer in g.layers)
            at = shard.group_layers(layout, group).index(layer)
            self._pages.append((tier_key_of(group, pb.TIER_DEVICE), at))

    @property
    def device_tier(self) -> torch.Tensor:
        """The tensor of the first layer group's device tier."""
        return self._tiers[pb.TIER_DEVICE]

    @property
    def host_tier(self) -> torch.Tensor:
        """The tensor of the first layer group's host tier."""
        return self._tiers[pb.TIER_HOST]

    @property
    def num_blocks(self) -> dict[TierKey, int]:
        """Number of blocks of each tier."""
        return {tier_key: tier.shape[0] for tier_key, tier in self._tiers.items()}

    @property
    def num_bytes(self) -> dict[TierKey, int]:
        """Size of each tier in bytes."""
        return {tier_key: tier.nbytes for tier_key, tier in self._tiers.items()}

    def tier(self, tier_key: TierKey) -> torch.Tensor:
        """Return the tensor of a tier, shaped as described at the top of this file."""
        return self._tiers[tier_key]

    def group_of_layer(self, layer_index: int) -> int:
        """Return the layer group of one of the shard's layers."""
        return group_of(self._pages[layer_index][0])

    def pages(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's device pages: views of its keys [num_blocks, num_kv_heads,
        block_size_tokens, head_size], and of its values. ``layer_index``: among the shard's layers.
        """
        tier_key, at = self._pages[layer_index]
        return self.page_shapes[group_of(tier_key)].keys_and_values(self._tiers[tier_key][:, at])


def _release(drain: Callable[[], None], unpins: list[Callable[[], None]]) -> None:
    """Wait until the device no longer uses the tiers, unless it failed; then unpin their memory."""
    with suppress(InternalError):
        drain()
    for unpin in unpins:
        unpin()


def _on_gpu(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise NeverFitsError(
            f"the device tier does not fit on {device}: {error}", field="num_device_blocks"
        ) from error


def empty_pinned(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, field: str
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Allocate a pinned CPU tensor like ``torch.empty`` for the GPU ``device``. Returns it and a
    function that unpins it.

    Torch rounds its pinned memory up to a power of two, which can double the memory of a large
    tier. A large tensor is therefore allocated as for the CPU and then registered with the driver.
    Raises NeverFitsError naming ``field`` when there is too little memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    _check_fits(num_bytes, field)
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype), lambda: None
    # Otherwise the driver would initialize whichever GPU is current, and use some of its memory.
    with torch.cuda.device(device):
        if num_bytes < huge_pages.HUGE_PAGE_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=True), lambda: None
        tensor = huge_pages.empty(shape, dtype)
        address = tensor.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, num_bytes, _FOR_ALL_GPUS)) != 0:
            _forget_last_error(device)
            raise NeverFitsError(f"{num_bytes} bytes of host memory cannot be pinned", field=field)

    def unpin() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    return tensor, unpin


def _forget_last_error(device: torch.device) -> None:
    """Clear CUDA's last error by a dummy launch. Torch checks that error after each launch, and
    would blame the next one for the failure here.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _check_fits(num_bytes: int, field: str) -> None:
    """Check that ``num_bytes`` of memory are free. Raises NeverFitsError otherwise: pinning touches
    all of it at once, so the system would kill the process.
    """
    free = free_bytes(torch.device("cpu"))
    if num_bytes > free:
        raise NeverFitsError(
            f"{num_bytes} bytes do not fit in the {free} that are free", field=field
        )
