"""Models whose code in transformers computes attention itself, and models with multi-head latent
attention (MLA).

An adapter replaces a method of the attention modules of the former: their forward, or ``_attn``
where that computes attention alone. It computes the same projections and gives q, k and v to the
attention that is registered as "kvplane"; with any other implementation the module's own code runs.
ALiBi becomes a slope for each head, ``module.alibi_slopes``. BLOOM, MPT and Falcon have an adapter
each; other modules are known by the layers and methods that they have (``_adapter_of``).

Code of the latter expands latents to keys and values right before attention, by a method
``expand_kv``. Where the step that runs keeps latents, they are passed on unexpanded. Rotary
positions, norms and scales stay the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.mpt import modeling_mpt
from transformers.models.mpt.modeling_mpt import MptAttention

from kvplane.errors import InvalidRequestError
from kvplane.transformers import absorbed, attention
from kvplane.transformers.models.positions import adapt_positions

Forward = Callable[..., Any]
Slopes = Callable[[Any, Any], torch.Tensor | None]
_ADAPTED: Final = "_kvplane_adapted"


@dataclass
class _Adapted:
    """An adapted module's attribute: the model's config, and the method's code, ours and its own.
    A copy of the model copies it, so that it computes with its own weights.
    """

    config: PreTrainedConfig
    ours: Forward
    own: Forward


def adapt(model: PreTrainedModel) -> None:
    """Change the attention modules of ``model`` that this file knows, so that they use "kvplane"
    and pass latents on, and its position embeddings.
    """
    adapt_positions(model)
    _hand_on_latents(model)
    modules: list[Any] = list(model.modules())
    for module in modules:
        found = None if hasattr(module, _ADAPTED) else _adapter_of(module)
        if found is not None:
            name, slopes, ours = found
            module.alibi_slopes = slopes(module, model)
            setattr(module, _ADAPTED, _Adapted(model.config, ours, getattr(module, name)))
            setattr(module, name, MethodType(_either, module))


def is_adapted(model: PreTrainedModel) -> bool:
    """Return whether ``adapt`` changed a module of ``model``."""
    return any(hasattr(module, _ADAPTED) for module in model.modules())


def reference(model: PreTrainedModel) -> str:
    """Return the name of transformers' attention that is right for ``model``: "eager", but for
    Falcon with ALiBi, whose eager attention adds the bias twice.
    """
    modules: list[Any] = list(model.modules())
    adds_twice = any(type(module) is FalconAttention and module.config.alibi for module in modules)
    return "sdpa" if adds_twice else "eager"


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation, also of models for which transformers allows no choice."""
    if is_adapted(model):
        model.config._attn_implementation = name
    else:
        model.set_attn_implementation(name)


def _either(module: Any, *arguments: Any, **named: Any) -> Any:
    adapted: _Adapted = getattr(module, _ADAPTED)
    if adapted.config._attn_implementation != attention.NAME:
        return adapted.own(*arguments, **named)
    return adapted.ours(module, *arguments, **named)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Attend: [1, num_heads, T, D] and [1, num_kv_heads, T, D] to [1, T, num_heads * D]."""
    attend = AttentionInterface()[attention.NAME]
    out: torch.Tensor
    out, _ = attend(module, query, key, value, None, scaling=scale, sliding_window=window)
    return out.flatten(2)


def _hand_on_latents(model: PreTrainedModel) -> None:
    """Change the layers of ``model`` that have latents, so that they pass them on."""
    absorbed.share(model)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if absorbed.has_latents(module):
            module.expand_kv = MethodType(_expand_kv, module)


def _expand_kv(
    module: Any, latent: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [num_rows, 1, num_columns, kv_lora_rank] and [..., qk_rope_head_dim] to keys and values,
    or to the stored latent and its first part, which takes the value's place.
    """
    if absorbed.keeps_latents(module):
        return torch.cat((latent, rotary), dim=-1), latent
    expanded: tuple[torch.Tensor, torch.Tensor]
    expanded = type(module).expand_kv(module, latent, rotary)
    return expanded


def _bloom_slopes(module: Any, model: Any) -> torch.Tensor:
    mask = torch.ones(1, 2, device=module.dense.weight.device)
    return _step(model.base_model.build_alibi_tensor(mask, module.num_heads, torch.float32))


def _bloom(
    module: Any, hidden: torch.Tensor, residual: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden))
    out = _attend(module, query, key, value, module.inv_norm_factor)
    return residual + module.dense(out), None


def _mpt_slopes(module: Any, model: Any) -> torch.Tensor:
    return _step(model.base_model.build_mpt_alibi_tensor(module.n_heads, 2))


def _mpt(module: Any, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2)
        for part in mixed.chunk(3, dim=2)
    )
    return module.out_proj(_attend(module, query, key, value, module.softmax_scale)), None


def _falcon_slopes(module: Any, model: Any) -> torch.Tensor | None:
    """Return Falcon's slopes, scaled: it adds ALiBi before it scales the scores."""
    if not module.config.alibi:
        return None
    mask = torch.ones(1, 2, dtype=torch.long)
    alibi = modeling_falcon.build_alibi_tensor(mask, module.num_heads, torch.float32)
    scale: float = module.inv_norm_factor
    return _step(alibi) * scale


def _falcon(
    module: Any,
    hidden: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (
        part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden))
    )
    if module.alibi_slopes is None and position_embeddings is not None:
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    repeats = key.shape[1] // module.num_kv_heads  # the split gives each query head a copy
    key, value = key[:, ::repeats], value[:, ::repeats]
    return module.dense(_attend(module, query, key, value, module.inv_norm_factor)), None


def _step(alibi: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi slopes, given the bias [num_heads, 1, 2] of two positions."""
    return alibi[:, 0, 1] - alibi[:, 0, 0]


def _no_slopes(*_: Any) -> None:
    return None


def _projected(
    module: Any, hidden_states: torch.Tensor, *arguments: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """The forward of a module that projects hidden states by three linear layers, and the output by
    a fourth or not. Raises InvalidRequestError for other states to attend to.
    """
    of_encoder = (named.get(name) for name in ("key_value_states", "encoder_hidden_states"))
    if any(isinstance(value, torch.Tensor) for value in (*arguments, *of_encoder)):
        raise InvalidRequestError("attends to an encoder's states", field="model")
    names = next(names for names in _PROJECTIONS if hasattr(module, names[0]))
    size: int = getattr(module, names[3])
    query, key, value = (
        getattr(module, name)(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2)
        for name in names[:3]
    )
    out = _attend(module, query, key, value, size**-0.5)
    return getattr(module, names[4])(out) if names[4] else out, None


_PROJECTIONS: Final = (
    ("query", "key", "value", "attention_head_size", ""),
    ("q_proj", "k_proj", "v_proj", "head_dim", "out_proj"),
)
"""Names of a module's projections of queries, keys and values, of a head's size, and of the output.
"""


def _inner(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    """The method ``_attn`` of a module: [1, num_heads, T, D] to the same shape."""
    is_local = getattr(module, "attention_type", "") == "local"
    window = module.config.window_size if is_local else 0
    scale = 1 / getattr(module, "norm_factor", 1.0)
    out = _attend(module, query, key, value, scale, window)
    return out.view(*out.shape[:2], -1, value.shape[3]).transpose(1, 2), None


def _adapter_of(module: Any) -> tuple[str, Slopes, Forward] | None:
    """Return the method to replace, and its adapter; None for modules that need none."""
    if type(module) in _KINDS:
        return "forward", *_KINDS[type(module)]
    if isinstance(getattr(module, "layer_id", None), int) and not hasattr(module, "layer_idx"):
        module.layer_idx = module.layer_id
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(getattr(module, "layer_idx", None), int) or code is None:
        return None
    if "ALL_ATTENTION_FUNCTIONS" in code.co_names:  # calls attention by its name
        return None
    if hasattr(module, "_attn"):
        return "_attn", _no_slopes, _inner
    if any(all(hasattr(module, n) for n in names if n) for names in _PROJECTIONS):
        return "forward", _no_slopes, _projected
    return None


_KINDS: Final[dict[type, tuple[Slopes, Forward]]] = {
    BloomAttention: (_bloom_slopes, _bloom),
    MptAttention: (_mpt_slopes, _mpt),
    FalconAttention: (_falcon_slopes, _falcon),
}


def _accept_no_mask() -> None:
    """Patch MPT, which converts its mask, to accept that "kvplane" has none."""
    mpt: Any = modeling_mpt
    make_mask = mpt.create_causal_mask

    def make(*arguments: Any, **named: Any) -> Any:
        mask = make_mask(*arguments, **named)
        return torch.zeros((), dtype=torch.bool) if mask is None else mask

    mpt.create_causal_mask = make


_accept_no_mask()
