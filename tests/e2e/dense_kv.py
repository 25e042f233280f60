"""The engine's model with dense attention over keys and values as a pool would store them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from engine.models import loader
from kvplane.attention_options import AttentionOptions
from kvplane.transformers import attention

LayerScales = dict[int, tuple[float, float]]
"""Scales of keys and values, by layer."""
LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


class DenseKv:
    """Runs whole texts at once; neither pages nor kernels of ours have a part in it."""

    latent_layers: frozenset[int] = frozenset()

    def __init__(
        self, folder: Path, dtype: torch.dtype | None = None, scales: LayerScales | None = None
    ) -> None:
        """``dtype`` None keeps keys and values as they are."""
        self._loaded = loader.load(folder, "float32")
        self._dtype = dtype
        self._scales = scales or {}
        self.largest: LayerScales = {}

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], first: int) -> torch.Tensor:
        """float32 [tokens from ``first`` on, vocabulary]."""
        with attention.running(self, self._loaded.model):
            output = self._loaded.model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.arange(len(token_ids))[None],
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[0, first:].float()
        return logits

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Causal attention of [num_tokens, heads, head_size]."""
        assert options.sliding_window_tokens == 0
        seen = self.largest.get(index, (0.0, 0.0))
        self.largest[index] = (
            max(seen[0], float(key.abs().max())),
            max(seen[1], float(value.abs().max())),
        )
        key_scale, value_scale = self._scales.get(index, (1.0, 1.0))
        group = query.shape[1] // key.shape[1]
        key = self._stored(key, key_scale).repeat_interleave(group, dim=1)
        value = self._stored(value, value_scale).repeat_interleave(group, dim=1)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=options.scale or None,
        )
        return output[0].transpose(0, 1)

    def _stored(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what is read after ``numbers`` were written."""
        if self._dtype is None:
            return numbers
        of_float32 = torch.tensor(scale)
        largest = torch.finfo(self._dtype).max
        stored = (numbers / of_float32).clamp(-largest, largest).to(self._dtype)
        return stored.float() * of_float32


def calibrated(folder: Path, target: Path, texts: Sequence[str]) -> tuple[Path, LayerScales]:
    """The model of ``folder`` once more in ``target``, with a file of scales that map the largest
    keys and values of ``texts`` to the largest number of 8 bits.
    """
    dense = DenseKv(folder)
    encoder = loader.load(folder, "float32")
    for text in texts:
        dense.logits(encoder.encode(text, field="texts"), 0)
    scales = {i: (key / LARGEST, value / LARGEST) for i, (key, value) in dense.largest.items()}
    tensors = {
        f"model.layers.{i}.self_attn.{kind}_scale": torch.tensor(scale)
        for i, pair in scales.items()
        for kind, scale in zip("kv", pair, strict=True)
    }
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    save_file(tensors, target / "kv_scales.safetensors")
    return target, scales
