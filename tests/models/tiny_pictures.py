"""Tiny random models that take images, and prompts for them.

``python -m tests.models.tiny_pictures CONTROL_PLANE SEED...`` answers prompts with pictures.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from kvplane.transformers import PlaneCache, close_planes
from tests.helpers.plane_cache_checks import BLOCK_SIZE, answer
from tests.models.model_states import off_by
from tests.models.tiny_models import draw_weights

IMAGE: Final = 290
FIRST: Final = BLOCK_SIZE + 5
NUM_OF_IMAGE: Final = 16
NUM_COLUMNS: Final = 61
NUM_LAYERS: Final = 3
TEXT: Final = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION: Final = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip


def llava() -> PreTrainedModel:
    """Whose image tokens see what is before them."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT).to_dict(),
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32).to_dict(),
        image_token_id=IMAGE,
    )
    return _drawn(transformers.LlavaForConditionalGeneration(config))


def gemma3() -> PreTrainedModel:
    """Whose image tokens see each other."""
    text = transformers.Gemma3TextConfig(
        **TEXT, head_dim=16, sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=transformers.SiglipVisionConfig(**VISION).to_dict(),
        mm_tokens_per_image=NUM_OF_IMAGE,
        image_token_id=IMAGE,
    )
    return _drawn(transformers.Gemma3ForConditionalGeneration(config))


def qwen2_vl() -> PreTrainedModel:
    """Whose image tokens have positions of three dimensions."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE
    )
    return _drawn(transformers.Qwen2VLForConditionalGeneration(config))


def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    draw_weights(model)
    return model.train(False)


def prompt(seed: int = 1, *, first: int = FIRST) -> torch.Tensor:
    """Token ids [1, NUM_COLUMNS] with an image from column ``first`` on."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 280, (1, NUM_COLUMNS), generator=generator)
    ids[:, first : first + NUM_OF_IMAGE] = IMAGE
    return ids


def picture(seed: int) -> torch.Tensor:
    """Pixels of one image."""
    return 3 * torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(seed))


def answers_in_pool(control_plane: str, seeds: list[int]) -> list[dict[str, Any]]:
    """For each picture: how many tokens its prompt finds in the pool "default", and how far its
    logits are from those of eager attention.
    """
    model, answers = llava(), []
    for seed in seeds:
        how = {"input_ids": prompt(), "pixel_values": picture(seed)}
        want = answer(model, None, **how)
        with PlaneCache(model, control_plane=control_plane, model_id="llava") as cache:
            off = off_by(answer(model, cache, **how), want)
            answers.append({"found": cache.num_cached_tokens, "off": off})
    close_planes(model)
    return answers


if __name__ == "__main__":
    address, *pictures = sys.argv[1:]
    sys.stdout.write(json.dumps(answers_in_pool(address, [int(seed) for seed in pictures])))
