"""Builds an executor from settings: reads the layout, measures the memory, allocates the pools."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from data_plane.execution.commands import Observer
from data_plane.execution.executor import Executor
from data_plane.kernels.backend import Kernels, kernels_of
from data_plane.kernels.device.devices import choose_device, this_machine
from data_plane.memory.shares import fit_blocks, share_blocks
from data_plane.memory.sizing import free_bytes, measure_num_blocks
from data_plane.server.config import DataPlaneConfig
from kvplane.errors import InvalidRequestError, NeverFitsError
from kvplane.layout import KEYS_AND_VALUES, LATENT, LayerGroup, Layout
from kvplane.models.hf import layout_from_hf
from kvplane.shard import Shard

_LOGGER: Final = logging.getLogger(__name__)
_PAGE_BYTES: Final = 4096


def build_executor(
    config: DataPlaneConfig, observe: Observer | None = None, kernels: Kernels | None = None
) -> Executor:
    """An executor for ``config``. ``kernels``: None for those of the device in ``config``.

    Raises InvalidRequestError for a model, layout or device that cannot be used, and
    NeverFitsError when the memory has no room for a block, or for the blocks asked for.
    """
    device = choose_device(config.device, this_machine)
    kernels = kernels if kernels is not None else kernels_of(device, config.num_threads)
    _LOGGER.info("kernels backend=%s %s", kernels.backend, kernels.detail)
    layout = load_layout(config, kernels.cache_kinds)
    shard = shard_of(config, layout)
    num_device_blocks = config.num_device_blocks
    expected_tokens = config.expected_context_tokens
    host_blocks = share_blocks(layout, config.num_host_blocks, expected_tokens)
    block_bytes = partial(shard.block_bytes, layout)
    if num_device_blocks == 0:
        free = free_bytes(device)
        on_cpu = device.type == "cpu"
        host_tier_bytes = sum(n * block_bytes(i) for i, n in enumerate(host_blocks)) * on_cpu
        num_shared = config.num_local_device_regions if config.num_local_regions else 0
        shared_bytes = 0 if on_cpu else num_shared * config.local_region_bytes
        num_device_blocks = measure_num_blocks(
            free,
            lambda usable: fit_blocks(layout, usable, expected_tokens, block_bytes),
            utilization=config.memory_utilization,
            reserve_bytes=config.reserve_bytes + host_tier_bytes + shared_bytes,
            scratch_bytes=kernels.scratch_bytes,
        )
        _LOGGER.info("measured free_bytes=%d num_device_blocks=%d", free, num_device_blocks)
    device_blocks = share_blocks(layout, num_device_blocks, expected_tokens)
    _require_room(device, device_blocks, host_blocks, block_bytes, kernels.scratch_bytes)
    executor = Executor(
        layout,
        pool_id=config.pool_id,
        num_device_blocks=device_blocks,
        num_host_blocks=host_blocks,
        shard=shard,
        device=device,
        kernels=kernels,
        epoch=config.epoch,
        observe=observe,
    )
    if device.type == "cpu":
        for place in executor.pools.num_blocks:
            _touch(executor.pools.tier(place))
    return executor


def _require_room(
    device: torch.device,
    device_blocks: Sequence[int],
    host_blocks: Sequence[int],
    block_bytes: Callable[[int], int],
    scratch_bytes: int,
) -> None:
    """Raise NeverFitsError unless tiers of so many blocks of each layer group fit in what is free
    now, beside ``scratch_bytes`` of the device for its kernels: the system gives more memory than
    it has, and ends the process when it is used, and a GPU fails in the middle of a plan.
    ``block_bytes``: of a block of each group.
    """
    host = torch.device("cpu")
    taken = 0
    for field, blocks, where, kept in (
        ("num_host_blocks", host_blocks, host, 0),
        ("num_device_blocks", device_blocks, device, scratch_bytes),
    ):
        asked = sum(n * block_bytes(group) for group, n in enumerate(blocks))
        available = free_bytes(where) - (taken if where == host else 0) - kept
        if asked > available:
            raise NeverFitsError(
                f"{max(blocks)} blocks take {asked} bytes, {available} are available on {where}",
                field=field,
            )
        taken += asked


def _touch(tier: torch.Tensor) -> None:
    """Use each page once, so that the memory is there from now on."""
    if tier.numel():
        tier.view(torch.uint8).view(-1)[::_PAGE_BYTES].zero_()


def shard_of(config: DataPlaneConfig, layout: Layout) -> Shard:
    """The part of the pool that the settings name. Raises InvalidRequestError when it does not fit
    the layout.
    """
    index, num_shards = config.shard_index, config.num_shards
    ranges = (config.first_layer, config.num_layers, config.first_kv_head, config.num_kv_heads)
    if not any((*ranges, config.shard_copy)):
        return Shard.of_heads(layout, index, num_shards)
    whole = Shard.whole(layout)
    first_layer = max(config.first_layer, whole.first_layer)
    shard = Shard(
        index,
        num_shards,
        first_layer,
        config.num_layers or whole.first_layer + whole.num_layers - first_layer,
        config.first_kv_head,
        config.num_kv_heads or whole.num_kv_heads - config.first_kv_head,
        config.shard_copy,
    )
    shard.layers(layout)  # whether it fits
    return shard


def load_layout(
    config: DataPlaneConfig, cache_kinds: Collection[str] = (KEYS_AND_VALUES, LATENT)
) -> Layout:
    """The layout that the settings name; a model's is of ``cache_kinds`` alone. Raises
    InvalidRequestError.
    """
    if config.model is not None:
        return layout_from_hf(
            config.model,
            block_size_tokens=config.block_size_tokens,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype or None,
            latent=config.latent and LATENT in cache_kinds,
        )
    if config.layout is None:
        raise InvalidRequestError("give either --model or --layout", field="model")
    return layout_from_json(config.layout)


def layout_from_json(path: Path) -> Layout:
    """A layout from the fields of ``kvplane.layout.Layout`` as JSON. Raises InvalidRequestError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        groups = tuple(
            LayerGroup(**{**group, "layers": tuple(group["layers"])})
            for group in fields.pop("groups")
        )
        return Layout(groups=groups, **fields)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="layout") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(f"{path} is not a layout: {error}", field="layout") from error
