"""Tiny models of every causal type that transformers has, with fixed random weights.

Weights are drawn large enough that attention matters: queries meet keys with scores of several
units, so that a wrong mask, window or scale moves the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: Final = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCABULARY: Final = 64
NUM_LAYERS: Final = 4
WINDOW_TOKENS: Final = 8

_SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_layers": NUM_LAYERS,
    "encoder_layers": NUM_LAYERS,
    "num_encoder_layers": NUM_LAYERS,
    "num_decoder_layers": NUM_LAYERS,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "is_decoder": True,
    "decoder_ffn_dim": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "dim_model_base": 32,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_positions": 128,
    "rotary_dim": 8,
    "attention_chunk_size": 8,
    "num_nextn_predict_layers": 0,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
"""Entries that a config gets where its class has them, by the names most classes use."""


_SHARED: Final = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
_OF_TYPE: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 16, "mamba_d_head": 8},
    "big_bird": {"attention_type": "original_full"},  # the other kind is no decoder's
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {"initializer_range": 1.0, "n_input_layers": 1, "n_output_layers": 1},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_ssm": 128},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma4": {"global_head_dim": 32},
    "gemma4_assistant": _SHARED | {"global_head_dim": 32, "num_kv_shared_layers": NUM_LAYERS},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified": {"global_head_dim": 32},
    "gemma4_unified_assistant": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 16,
        "mamba_d_head": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {
        "ssm_state_size": 16, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2,
        "chunk_size": 16,
    },
    "mpt": {"max_seq_len": 128},
    "prophetnet": {"num_hidden_layers": None},
    "reformer": {
        "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"] * 2, "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "vaultgemma": {"attn_logit_softcapping": 2.0},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a type needs to be built, or else would not be exercised: caps and windows that bite. None:
an entry that it does not take.
"""

for _type in ("qwen4_exp", "qwen4_exp_text"):
    _OF_TYPE[_type] = {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    }  # fmt: skip


_PART: Final = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "blt": {
        "vocab_size": VOCABULARY, "patcher_config": _PART, "global_config": _PART,
        "encoder_config": _PART | {"hidden_size_global": 64},
        "decoder_config": _PART | {"hidden_size_global": 64}, "encoder_hash_byte_group_vocab": 100,
    },
    "gemma4_assistant": {"text_config": _SHARED | {"num_kv_shared_layers": 30}},
}  # fmt: skip
"""Arguments without which a type's default config is none, or is not small."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A small config of a type; layer types and what is mixed by layer stay mixed."""
    default = CONFIG_MAPPING[model_type](**_DEFAULTS.get(model_type, {}))
    if model_type == "blt":  # of parts that have layers of their own
        return default
    text = getattr(default, "decoder", None) or default.get_text_config(
        decoder=not default.is_encoder_decoder
    )
    layer = next(iter(text.per_layer_config), text)
    values = {
        name: value for name, value in _SIZES.items() if getattr(layer, name, None) is not None
    }
    if hasattr(layer, "num_key_value_heads"):
        is_grouped = layer.num_key_value_heads not in (None, layer.num_attention_heads)
        values["num_key_value_heads"] = 2 if is_grouped else 4
    if hasattr(layer, "head_dim"):
        values["head_dim"] = 8 if "qk_rope_head_dim" in values else 16
    if getattr(layer, "sliding_window", None) is not None:
        values["sliding_window"] = WINDOW_TOKENS
    values |= _layer_lists(text)
    values = {name: value for name, value in values.items() if not _is_derived(text, name)}
    values |= _OF_TYPE.get(model_type, {})
    if model_type.endswith("_assistant"):  # its text config alone is another type's
        values = {name: value for name, value in values.items() if value is not None}
        return type(default)(text_config=type(text)(**values))
    named = {text.attribute_map.get(name, name): value for name, value in values.items()}
    return type(text)(**{name: value for name, value in named.items() if value is not None})


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model of ``tiny_config``."""
    config = tiny_config(model_type)
    torch.manual_seed(seed)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:  # made of a part of the type's config
        model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        model = model_class._from_config(config, attn_implementation="eager")
    model.train(mode=False)
    draw_weights(model, seed)
    return model


def save_tiny(model_type: str, folder: Path) -> None:
    """``tiny_model`` as a folder that AutoModelForCausalLM takes."""
    model = tiny_model(model_type)
    model.save_pretrained(folder)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        CONFIG_MAPPING[model_type](text_config=model.config).save_pretrained(folder)


def draw_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Replace all weights by random ones; those of queries and keys are twice as large."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                is_norm = "norm" in name.lower() and name.endswith("weight")
                parameter.copy_(parameter + 0.1 * noise if is_norm else 0.3 * noise)
            else:
                is_score = any(part in name for part in ("q_", "k_", "query", "key", "qkv", "attn"))
                gain = 2.0 if is_score else 1.0
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)


def _layer_lists(text: PreTrainedConfig) -> dict[str, Any]:
    """Lists with an entry for each layer, cut to ``NUM_LAYERS`` so that every kind is kept."""
    lists = {}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(text, name, None)
        if kinds:
            distinct = list(dict.fromkeys(kinds))
            lists[name] = (distinct * NUM_LAYERS)[:NUM_LAYERS]
    return lists


def _is_derived(text: PreTrainedConfig, name: str) -> bool:
    """Whether the config's class computes the entry from others."""
    entry = getattr(type(text), text.attribute_map.get(name, name), None)
    return isinstance(entry, property) and entry.fset is None
