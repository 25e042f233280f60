"""What a model's layers give to attention: their code's shapes, where a config may have others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT
from kvplane.models.model_layers import LayerShape
from kvplane.transformers.attention import Step


def measure(
    run: Callable[[Step], object], num_layers: int, of_config: Sequence[LayerShape]
) -> list[LayerShape]:
    """The shape of each layer. ``run`` makes a forward pass of the first ``num_layers``; a later
    one has the shape of the first layer that is like it in ``of_config``, its config's.

    Raises InvalidRequestError unless every layer that ran calls attention once.
    """
    recorder = _Recorder(of_config)
    run(recorder)
    found = recorder.shapes
    if not found:
        raise InvalidRequestError(
            "computes attention in its own code, not by transformers' AttentionInterface",
            field="model",
        )
    if missing := sorted(set(range(num_layers)) - set(found)):
        raise InvalidRequestError(f"layer {missing[0]} calls no attention", field="model")
    if unknown := sorted(set(found) - set(range(num_layers))):
        raise InvalidRequestError(
            f"a layer calls attention as number {unknown[0]}, which its config does not have",
            field="model",
        )
    like = {of_config[index]: found[index] for index in reversed(range(num_layers))}
    return [found.get(index) or like.get(shape, shape) for index, shape in enumerate(of_config)]


class _Recorder:
    """Notes the shape of each layer's call, by the layer's index, and gives zeros."""

    def __init__(self, of_config: Sequence[LayerShape]) -> None:
        self._of_config = of_config
        self.shapes: dict[int, LayerShape] = {}

    @property
    def latent_layers(self) -> frozenset[int]:
        return frozenset(i for i, s in enumerate(self._of_config) if s.cache_kind == LATENT)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if index in self.shapes:
            raise InvalidRequestError(f"layer {index} calls attention twice", field="model")
        kind, value_size = KEYS_AND_VALUES, 0
        if value is None:
            kind, value_size = LATENT, self._of_config[index].value_head_size
        else:
            value_size = value.shape[2]
        self.shapes[index] = LayerShape(
            num_kv_heads=key.shape[1],
            head_size=key.shape[2],
            value_head_size=value_size,
            window_tokens=options.sliding_window_tokens,
            cache_kind=kind,
        )
        return query.new_zeros(*query.shape[:2], value_size)
