"""Multi-head latent attention (MLA) over latents: the projection from latents to keys and values is
absorbed into queries and outputs.

    query . (W_keys latent)             = (query W_keys) . latent
    sum of weight * (W_values latent)   = W_values (sum of weight * latent)

A latent is ``kv_lora_rank`` numbers, then the key's rotary part, which all heads share and which is
not projected.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from kvplane.errors import InvalidRequestError

_ATTRIBUTE: Final = "_kvplane_latents"


class _Kept:
    """The layers of a model that keep latents in the forward pass that runs: an attribute of the
    model and of its attention modules, which code that torch.compile traces can read.
    """

    def __init__(self) -> None:
        self.layers: frozenset[int] = frozenset()


def share(model: Any) -> None:
    """Let ``keep_latents`` reach the attention modules of ``model`` that have latents."""
    kept = _Kept()
    for module in model.modules():
        if has_latents(module):
            setattr(module, _ATTRIBUTE, kept)
            setattr(model, _ATTRIBUTE, kept)


def may_keep_latents(model: Any) -> bool:
    """Return whether ``share`` found layers in ``model`` that can pass latents on."""
    return _ATTRIBUTE in model.__dict__


def keep_latents(model: Any, layers: frozenset[int]) -> None:
    """Have these layers of ``model`` pass latents on from now on, and others keys and values."""
    kept = model.__dict__.get(_ATTRIBUTE)
    if kept is not None:
        kept.layers = layers


def keeps_latents(module: Any) -> bool:
    """Return whether an attention module passes its latents on."""
    kept = module.__dict__.get(_ATTRIBUTE)
    return kept is not None and module.layer_idx in kept.layers


def has_latents(module: Any) -> bool:
    """Return whether an attention module expands latents by a method that can be replaced."""
    return hasattr(type(module), "expand_kv")


def is_projection(module: Any, name: str) -> bool:
    """Return whether the child ``name`` of ``module`` is the layer whose weight is absorbed."""
    return has_latents(module) and name == "kv_b_proj"


def over_latents(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Map queries [num_rows, num_heads, num_columns, head_size] to queries over latents, [...,
    latent size]. Raises InvalidRequestError for a projection whose weight is not one of plain
    numbers.
    """
    sizes = [module.qk_nope_head_dim, module.qk_rope_head_dim]
    plain, rotary = torch.split(query, sizes, dim=-1)
    of_keys, _ = _projection(module, query.dtype)
    return torch.cat((plain @ of_keys, rotary), dim=-1)


def from_latents(module: Any, out: torch.Tensor) -> torch.Tensor:
    """Map attention's sums of latents [..., num_heads, kv_lora_rank] to outputs [..., num_heads,
    v_head_dim].
    """
    _, of_values = _projection(module, out.dtype)
    return torch.einsum("...hr,hvr->...hv", out, of_values)


def _projection(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the projection's weight by head: [num_heads, qk_nope_head_dim, kv_lora_rank]
    for keys, and [num_heads, v_head_dim, kv_lora_rank] for values.
    """
    linear = module.kv_b_proj
    is_plain = type(linear) is nn.Linear and linear.weight.dtype == dtype and linear.bias is None
    if not is_plain:
        raise InvalidRequestError(
            f"its kv_b_proj is no plain linear layer of {dtype}, which latents need: keep keys and "
            "values instead, with --no-latent or latent=False",
            field="model",
        )
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    weight = linear.weight.view(-1, sum(sizes), module.kv_lora_rank)
    of_keys, of_values = torch.split(weight, sizes, dim=1)
    return of_keys, of_values
