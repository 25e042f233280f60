"""The part of a model that its probe runs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

WINDOW_TOKENS: Final = 6
_SMALL: Final = 50_000_000
"""Number of parameters up to which a model is probed whole, and a part in float32."""


@contextlib.contextmanager
def part_of(
    model: PreTrainedModel, *, is_whole: bool = False
) -> Iterator[tuple[PreTrainedModel, int]]:
    """Yield the part of a model to probe, and its number of layers. A large model has only its
    first layers inside the context, unless ``is_whole``. A small part in half precision is copied
    to float32, in which differences are no rounding errors.
    """
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = _layers(model, num_layers)
    whole = list(layers)
    if whole and not is_whole and _num_parameters(model) > _SMALL:
        num_layers = min(_num_distinct(whole), num_layers)
        del layers[num_layers:]
    try:
        is_half = model.dtype in (torch.float16, torch.bfloat16)
        is_quantised = getattr(model, "hf_quantizer", None) is not None
        if is_half and not is_quantised and _num_parameters(model) <= _SMALL:
            yield copy.deepcopy(model).float(), num_layers
        else:
            yield model, num_layers
    finally:
        layers.extend(whole[len(layers) :])


@contextlib.contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten windows of config and layers to ``WINDOW_TOKENS``, inside the context."""
    holders: list[Any] = [model.config.get_text_config(decoder=True), *model.modules()]
    holders = [h for h in holders if isinstance(getattr(h, "sliding_window", None), int)]
    before = [(holder, holder.sliding_window) for holder in holders]
    for holder, window in before:
        holder.sliding_window = min(window, WINDOW_TOKENS)
    try:
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


def _num_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _layers(model: PreTrainedModel, count: int) -> torch.nn.ModuleList:
    """Return the decoder layers; an empty list if no list has the config's length."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    return torch.nn.ModuleList()


def _num_distinct(layers: Sequence[torch.nn.Module]) -> int:
    """Return how many of the first layers include each kind of layer, at least two."""
    kinds = [
        tuple((name, type(module).__name__) for name, module in layer.named_modules())
        + tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        + tuple(getattr(module, "sliding_window", None) for module in layer.modules())
        for layer in layers
    ]
    return max(2, max(kinds.index(kind) for kind in kinds) + 1)
