"""The layer groups of a transformers model, from its config.

There is no list of model names here. A layer is described by entries that configs of many models
share. The probe of the loaded model (``kvplane/transformers/models/probe.py``) finds models whose
code differs from their config.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT, MAX_LATENT_SIZE, LayerGroup

_SLIDING: Final = ("sliding_attention", "hybrid_sliding")
_ATTENTION: Final = ("full_attention", "hybrid", *_SLIDING)
_STATE: Final = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_WITHOUT: Final = ("moe", "mlp")
"""Layer types of transformers' caches. Hybrid layers have attention and a running state."""


@dataclass(frozen=True, slots=True, order=True)
class LayerShape:
    """The shape that all layers of a group have. ``window_tokens`` 0: attention sees everything."""

    num_kv_heads: int
    head_size: int
    value_head_size: int
    window_tokens: int
    cache_kind: str = KEYS_AND_VALUES


def layer_groups(config: Any, *, latent: bool = True) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a model with this config, without those of running states.

    ``latent``: layers with multi-head latent attention (MLA) keep their latents where the kernels
    serve the sizes; False for their keys and values. Raises InvalidRequestError naming the entry
    that is missing, wrong, or means attention of another kind.
    """
    return groups_of(layer_shapes(config, latent=latent))


def has_states(config: Any) -> bool:
    """Return whether layers of the config keep a running state, whose size it does not tell."""
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return any(kind in _STATE for kind in types)


def groups_of(shapes: Sequence[LayerShape | None]) -> tuple[LayerGroup, ...]:
    """Group layers ``i`` by their shapes ``shapes[i]``, in the order of groups' first layers."""
    groups: dict[LayerShape, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        if shape is not None:
            groups[shape].append(index)
    return tuple(
        LayerGroup(
            name=_name(shape, list(groups)),
            layers=tuple(layers),
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            sliding_window_tokens=shape.window_tokens,
            cache_kind=shape.cache_kind,
            value_head_size=shape.value_head_size,
        )
        for shape, layers in groups.items()
    )


def layer_shapes(config: Any, *, latent: bool = True) -> list[LayerShape | None]:
    """Return the shape of each layer's attention; None if it has none. ``latent`` and errors: see
    ``layer_groups``.
    """
    text = config.get_text_config(decoder=True)
    num_layers = _positive(text, "num_hidden_layers")
    types = getattr(text, "layer_types", None) or [None] * num_layers
    for index, kind in enumerate(types):
        if kind is not None and kind not in (*_ATTENTION, *_STATE, *_WITHOUT):
            raise InvalidRequestError(
                f"layer {index} is of type {kind!r}: only full and sliding attention and running "
                "states are served",
                field="config.layer_types",
            )
    if not any(kind is None or kind in _ATTENTION for kind in types):
        raise InvalidRequestError(
            "has no layer with attention, and a pool of running states alone is not served",
            field="config.layer_types",
        )
    return [
        _attention_shape(layer, kind, latent)
        for layer, kind in zip(text.per_layer_config, types, strict=True)
    ]


def _attention_shape(layer: Any, kind: str | None, latent: bool) -> LayerShape | None:
    if kind is not None and kind not in _ATTENTION:
        return None
    shape = _shape(layer, kind)
    return _of_latents(layer, shape) if latent else shape


def _of_latents(layer: Any, shape: LayerShape) -> LayerShape:
    """Return the shape of an MLA layer's latents if the kernels serve it, else ``shape``."""
    rank = getattr(layer, "kv_lora_rank", None)
    if not rank or not getattr(layer, "qk_nope_head_dim", None):
        return shape
    size = rank + _positive(layer, "qk_rope_head_dim")
    if size > MAX_LATENT_SIZE or size % 8 or rank % 8:
        return shape
    return replace(shape, num_kv_heads=1, head_size=size, value_head_size=rank, cache_kind=LATENT)


def _shape(layer: Any, kind: str | None) -> LayerShape:
    """Return a layer's shape. ``kind``: None if layers have none; all then have the same window."""
    num_heads = _positive(layer, "num_attention_heads")
    num_kv_heads = _num_kv_heads(layer, num_heads)
    if num_heads % num_kv_heads:
        raise InvalidRequestError(
            f"must divide num_attention_heads, which is {num_heads}",
            field="config.num_key_value_heads",
        )
    head_size = _head_size(layer, num_heads)
    window = None
    if kind in (None, *_SLIDING):
        window = getattr(layer, "sliding_window", None)
    return LayerShape(
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=_positive(layer, "v_head_dim", default=head_size),
        window_tokens=window or 0,
    )


def _num_kv_heads(layer: Any, num_heads: int) -> int:
    """Return a layer's number of KV heads. Falcon has other entries for it than the rest."""
    is_multi_query = getattr(layer, "multi_query", False)
    if is_multi_query and not getattr(layer, "new_decoder_architecture", False):
        return 1
    default = getattr(layer, "num_kv_heads", None) or num_heads
    return _positive(layer, "num_key_value_heads", default=default)


def _head_size(layer: Any, num_heads: int) -> int:
    """Return the size of a layer's keys. MLA has a part with rotary positions and one without."""
    if getattr(layer, "qk_nope_head_dim", None):
        return _positive(layer, "qk_nope_head_dim") + _positive(layer, "qk_rope_head_dim")
    if getattr(layer, "head_dim", None) is not None:
        return _positive(layer, "head_dim")
    hidden_size = _positive(layer, "hidden_size")
    if hidden_size % num_heads:
        raise InvalidRequestError(
            f"must be a multiple of num_attention_heads, which is {num_heads}",
            field="config.hidden_size",
        )
    return hidden_size // num_heads


def _positive(config: Any, name: str, *, default: int | None = None) -> int:
    value = getattr(config, name, None)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequestError(f"must be a positive integer, is {value}", field=f"config.{name}")
    return value


def _name(shape: LayerShape, shapes: list[LayerShape]) -> str:
    """Name a group by its window, and by its other sizes where groups differ in them."""
    whole = LATENT if shape.cache_kind == LATENT else "full"
    name = f"window-{shape.window_tokens}" if shape.window_tokens else whole
    same = [other for other in shapes if other.window_tokens == shape.window_tokens]
    if len(same) == 1:
        return name
    return f"{name}-{shape.num_kv_heads}x{shape.head_size}"
