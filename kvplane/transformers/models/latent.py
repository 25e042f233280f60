"""Models with multi-head latent attention (MLA), whose code in transformers expands latents to keys
and values right before attention, by a method ``expand_kv``.

Where the step that runs keeps latents, they are handed on as they are. Rotary positions, norms and
scales stay the model's own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvplane.transformers import absorbed, attention


def adapt(model: PreTrainedModel) -> None:
    """Let the layers of ``model`` that have latents hand them on."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if absorbed.has_latents(module):
            module.expand_kv = MethodType(_expand_kv, module)


def _expand_kv(
    module: Any, latent: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_rows, 1, num_columns, kv_lora_rank] and [..., qk_rope_head_dim]: keys and values, or the
    latent that is stored, and the part of it that takes the value's place.
    """
    if attention.keeps_latents(module):
        return torch.cat((latent, rotary), dim=-1), latent
    expanded: tuple[torch.Tensor, torch.Tensor]
    expanded = type(module).expand_kv(module, latent, rotary)
    return expanded
