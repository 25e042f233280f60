"""Baichuan and Baichuan 2, 7B and 13B, from their own checkpoints.

Their code lies beside the weights and does not run with today's transformers. They are Llamas with
three differences, which this file implements: one matrix ``W_pack`` holds the projections of
queries, keys and values; 13B has ALiBi in place of rotary positions; and in Baichuan 2 the rows of
the output matrix are normalised before use (NormHead).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from kvplane.errors import InvalidRequestError
from kvplane.transformers import attention

MODEL_TYPE: Final = "baichuan"
_SAME: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_PACK: Final = "self_attn.W_pack.weight"
_HEAD: Final = "lm_head.weight"
_IGNORED: Final = "rotary_emb.inv_freq"


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the Baichuan model in ``folder``. Raises InvalidRequestError naming what is missing."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    has_rotary_positions = "max_position_embeddings" in fields  # read only by the code of 7B
    limit = "max_position_embeddings" if has_rotary_positions else "model_max_length"
    try:
        same = {name: fields[name] for name in _SAME if name in fields}
        config = LlamaConfig(**same, max_position_embeddings=fields[limit])
    except Exception as error:
        raise InvalidRequestError(f"is no Baichuan config: {error!r}", field="config") from error
    config._attn_implementation = "eager"
    model: Any
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to(dtype=dtype)
    is_second = "z_loss_weight" in fields  # an entry of Baichuan 2 alone, as its NormHead
    weights = {name: value.to(dtype) for name, value in _weights(folder, normal_head=is_second)}
    result = model.load_state_dict(weights, strict=False, assign=True)
    if result.missing_keys or result.unexpected_keys:
        raise InvalidRequestError(
            f"lacks weights {result.missing_keys[:3]} or has unknown ones "
            f"{result.unexpected_keys[:3]}",
            field="checkpoint",
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on "meta"
    if not has_rotary_positions:
        _use_alibi(model)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return cast(PreTrainedModel, model)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the ALiBi slopes, float32 [num_heads] (arXiv:2108.12409): powers of 2 ** (-8 / n) for
    the largest power of two n up to ``num_heads``, then every second one of twice as many heads.
    """
    n = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    between = [2 ** (-4 * (2 * i + 1) / n) for i in range(num_heads - n)]
    return torch.tensor(first + between)


class _AlibiAttention(LlamaAttention):
    """Llama's attention with ALiBi. For attention that takes a mask, the bias is in the mask."""

    alibi_slopes: torch.Tensor

    def forward(  # takes all of the superclass's arguments
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        if self.config._attn_implementation != attention.NAME and attention_mask is not None:
            device = attention_mask.device
            positions = torch.arange(attention_mask.shape[-1], device=device)
            bias = self.alibi_slopes.to(device)[:, None, None] * positions
            attention_mask = attention_mask + bias.to(attention_mask.dtype)
        return super().forward(hidden_states, position_embeddings, attention_mask, **named)


class _NoRotation(torch.nn.Module):
    """Replaces rotary embeddings by angles of zero, which change nothing."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self._head_size = head_size

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, self._head_size)
        return hidden.new_ones(shape), hidden.new_zeros(shape)


def _use_alibi(model: Any) -> None:
    model.model.rotary_emb = _NoRotation(model.model.layers[0].self_attn.head_dim)
    slopes = alibi_slopes(model.config.num_attention_heads)
    for layer in model.model.layers:
        layer.self_attn.__class__ = _AlibiAttention
        layer.self_attn.alibi_slopes = slopes


def _weights(folder: Path, *, normal_head: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's weights under Llama's names."""
    for name, value in _stored(folder):
        if name.endswith(_PACK):
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                yield name.replace("W_pack", f"{part}_proj"), rows.contiguous()
        elif name == _HEAD and normal_head:
            yield name, normalize(value.float())
        elif not name.endswith(_IGNORED):
            yield name, value


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of all the checkpoint's files, in safetensors' format or in torch's."""
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        yield from load_file(path).items()
    if paths:
        return
    paths = sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise InvalidRequestError(f"{folder} holds no weights", field="checkpoint")
    for path in paths:
        yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()
