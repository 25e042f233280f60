"""Planted faults of models that keep latents. Each takes pytest's monkeypatch and plants itself for
one test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_plane.execution.shards import shard_kernels
from data_plane.memory.pages import PageShape
from kvplane.attention_options import AttentionOptions
from kvplane.transformers import absorbed, attention
from kvplane.transformers.models import adapters

Fault = Callable[[pytest.MonkeyPatch], None]


def keys_and_values_halves_are_exchanged(patch: pytest.MonkeyPatch) -> None:
    """Queries absorb the part of the projection that makes values."""
    original = absorbed._projection
    patch.setattr(absorbed, "_projection", lambda *of: original(*of)[::-1])


def heads_are_interleaved(patch: pytest.MonkeyPatch) -> None:
    """The projection's rows are taken head by head in the other order."""
    original = absorbed._projection
    patch.setattr(
        absorbed, "_projection", lambda *of: tuple(part.flip(0) for part in original(*of))
    )


def rotary_parts_come_first(patch: pytest.MonkeyPatch) -> None:
    """Queries begin with what latents end with."""
    original = absorbed.over_latents

    def over_latents(module: Any, query: torch.Tensor) -> torch.Tensor:
        return original(module, query).roll(module.qk_rope_head_dim, -1)

    patch.setattr(absorbed, "over_latents", over_latents)


def rotary_parts_are_lost(patch: pytest.MonkeyPatch) -> None:
    """Scores are of the parts without positions alone."""
    original = absorbed.over_latents

    def over_latents(module: Any, query: torch.Tensor) -> torch.Tensor:
        made = original(module, query)
        made[..., -module.qk_rope_head_dim :] = 0
        return made

    patch.setattr(absorbed, "over_latents", over_latents)


def latents_are_not_normed(patch: pytest.MonkeyPatch) -> None:
    """What is stored is not what the projection takes."""
    original = attention.keeps_latents

    def expand_kv(module: Any, one: torch.Tensor, rotary: torch.Tensor) -> Any:
        if not original(module):
            return type(module).expand_kv(module, one, rotary)
        return torch.cat((one / one.std(-1, keepdim=True), rotary), -1), one

    patch.setattr(adapters, "_expand_kv", expand_kv)


def outputs_are_of_one_head(patch: pytest.MonkeyPatch) -> None:
    """All heads project their weighted latents as the first one does."""
    original = absorbed._projection

    def projection(*of: Any) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys, of_values = original(*of)
        return of_keys, of_values[:1].expand_as(of_values)

    patch.setattr(absorbed, "_projection", projection)


def scales_are_of_the_latents_size(patch: pytest.MonkeyPatch) -> None:
    """Attention takes the default scale of what is stored."""
    original = attention.options_of

    def options_of(*of: Any) -> AttentionOptions:
        options = original(*of)
        return replace(options, scale=40**-0.5)

    patch.setattr(attention, "options_of", options_of)


def values_are_the_end_of_latents(patch: pytest.MonkeyPatch) -> None:
    """The data plane takes a value from the wrong end of its row."""

    def keys_and_values(self: PageShape, pages: torch.Tensor) -> Any:
        keys = self.stored(pages)[0]
        return keys, keys[..., -self.group.value_size :]

    patch.setattr(PageShape, "keys_and_values", keys_and_values)
    patch.setattr(shard_kernels, "WriteArguments", _with_values)


def _with_values(key: Any, value: Any, *rest: Any) -> Any:
    from data_plane.kernels.arguments import WriteArguments

    size = rest[0][1].shape[-1]
    return WriteArguments(key, key[..., -size:], *rest)


FAULTS: tuple[Fault, ...] = (
    keys_and_values_halves_are_exchanged,
    heads_are_interleaved,
    rotary_parts_come_first,
    rotary_parts_are_lost,
    latents_are_not_normed,
    outputs_are_of_one_head,
    scales_are_of_the_latents_size,
    values_are_the_end_of_latents,
)
