"""Running states of recurrent layers: they live in transformers' own cache layers, row by row, and
become pages of a pool at checkpoints.

A page holds what one row has in one layer: the bytes of its convolution and recurrent states, one
after another, then zeros. Which layers keep a state, and of what size, is found by running the
model once and looking into its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvplane.layout import STATE, LayerGroup
from kvplane.transformers import attention
from kvplane.transformers.columns import ColumnLayer, Extent

_UNIT_BYTES: Final = 64
_KINDS: Final = ("conv_states", "recurrent_states")


class _StateAndColumnLayer(LinearAttentionLayer, ColumnLayer):  # type: ignore[override]
    """A layer with a running state and with attention, as Falcon-H1 has."""

    is_compileable = False

    def __init__(self, extent: Extent, number_of_states: int) -> None:
        ColumnLayer.__init__(self, extent)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def cache_layers(config: PreTrainedConfig, extent: Extent) -> list[Any]:
    """Make cache layers without keys and values, one for each layer of a model with states. Their
    running states are empty, as before the first token.
    """
    return [_without_keys(layer, extent) for layer in DynamicCache(config=config).layers]


def _without_keys(layer: Any, extent: Extent) -> Any:
    num_states = getattr(layer, "number_of_states", 0)
    if not isinstance(layer, CacheLayerMixin):
        return layer
    return _StateAndColumnLayer(extent, num_states) if num_states else ColumnLayer(extent)


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """A tensor of a layer's state. ``kind``: the layer's attribute; ``shape``: of one row."""

    kind: str
    index: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class States:
    """What a row of a model with running states keeps: tensors by layer."""

    layers: dict[int, list[_StateTensor]]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the largest layer's, rounded up to a unit."""
        most = max(sum(t.num_bytes for t in tensors) for tensors in self.layers.values())
        return -(-most // _UNIT_BYTES) * _UNIT_BYTES

    @property
    def group(self) -> LayerGroup:
        """The layer group that a pool has for the states."""
        return LayerGroup(
            name=STATE,
            layers=tuple(self.layers),
            num_kv_heads=1,
            head_size=0,
            cache_kind=STATE,
            page_bytes=self.page_bytes,
        )

    def of_first(self, num_layers: int) -> States:
        """Return the states of the model's first layers alone."""
        return States({i: tensors for i, tensors in self.layers.items() if i < num_layers})

    def read(self, layers: Sequence[Any], rows: list[int] | None = None) -> torch.Tensor:
        """Copy the running states of some rows, or all, in a cache's ``layers`` to pages, uint8
        [num_state_layers, num_rows, page_bytes] on the model's device.
        """
        pages = []
        for index, tensors in self.layers.items():
            parts = [getattr(layers[index], t.kind)[t.index] for t in tensors]
            taken = parts if rows is None else [part[rows] for part in parts]
            data = [part.detach().contiguous().flatten(1).view(torch.uint8) for part in taken]
            page = torch.cat(data, dim=1)
            pages.append(torch.nn.functional.pad(page, (0, self.page_bytes - page.shape[1])))
        return torch.stack(pages)

    def write(self, layers: Sequence[Any], pages: torch.Tensor, device: torch.device) -> None:
        """Copy pages to the running states of a cache's ``layers``, which are empty or of as many
        rows.
        """
        for page, (index, tensors) in zip(pages, self.layers.items(), strict=True):
            ends = torch.tensor([0, *(t.num_bytes for t in tensors)]).cumsum(0).tolist()
            for tensor, (first, stop) in zip(tensors, pairwise(ends), strict=True):
                rows = page[:, first:stop].to(device).contiguous().view(tensor.dtype)
                self._set(layers[index], tensor, rows.view(-1, *tensor.shape))

    def _set(self, layer: Any, tensor: _StateTensor, rows: torch.Tensor) -> None:
        empty: dict[str, Any] = {tensor.kind: rows, "state_idx": tensor.index}
        LinearAttentionLayer.lazy_initialization(layer, **empty)
        getattr(layer, tensor.kind)[tensor.index].copy_(rows)
        layer.has_previous_state[tensor.index] = True


@torch.inference_mode()
def find_states(model: PreTrainedModel) -> States | None:
    """Run two tokens through the model with a cache of transformers' own, and return what its
    layers then keep besides keys and values; None if nothing. The attention implementation must be
    one that computes without kvplane.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), cache=cache)
    found: dict[int, list[_StateTensor]] = {}
    for index, layer in enumerate(cache.layers):
        for kind in _KINDS:
            for i, tensor in getattr(layer, kind, {}).items():
                if tensor is not None:
                    state = _StateTensor(kind, i, tensor.shape[1:], tensor.dtype)
                    found.setdefault(index, []).append(state)
    return States(found) if found else None


def may_keep_states(config: PreTrainedConfig) -> bool:
    """Return whether transformers' cache of a model has layers for running states."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


class StateCache(Cache):
    """The running states of a batch of rows, for one forward pass after another. Keys and values go
    to the step that runs.
    """

    def __init__(self, model: PreTrainedModel, states: States) -> None:
        super().__init__(layers=cache_layers(model.config, Extent()))
        self._states = states
        self._device = model.device

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values as they are: attention writes them."""
        attention.note_layer(layer_idx)
        return key_states, value_states

    def pages(self, rows: list[int] | None = None) -> torch.Tensor:
        """Return the states of some rows, or all: see ``States.read``."""
        return self._states.read(self.layers, rows)

    def restore(self, pages: torch.Tensor) -> None:
        """Continue from these states: see ``States.write``."""
        self._states.write(self.layers, pages, self._device)
