"""A small model without training, whose answers depend on every token before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

VOCABULARY = 259


def save_byte_model(folder: Path) -> Path:
    """Save a random byte-level Llama in which attention matters, with its tokenizer."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder
