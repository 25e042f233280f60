"""What a model's attention calls become: options that are made once a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.transformers.attention import options_of


def test_the_arguments_of_a_call_become_options() -> None:
    module = torch.nn.Module()
    arguments = {"sliding_window": 8, "softcap": 50.0, "s_aux": torch.tensor([0.5, -1.0])}
    assert options_of(module, 0.25, arguments) == AttentionOptions(
        scale=0.25, sliding_window_tokens=8, logit_soft_cap=50.0, sinks=(0.5, -1.0)
    )
    assert options_of(torch.nn.Module(), None, {"dropout": 0.0}) == AttentionOptions()


def test_slopes_are_the_modules() -> None:
    module: Any = torch.nn.Module()
    module.alibi_slopes = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    assert options_of(module, 1.0, {}).alibi_slopes == (0.5, 0.25)


def test_options_are_made_once_a_layer() -> None:
    module = torch.nn.Module()
    arguments = {"s_aux": torch.nn.Parameter(torch.ones(64)), "sliding_window": None}
    first = options_of(module, 0.5, arguments)
    assert options_of(module, 0.5, dict(arguments)) is first


@pytest.mark.parametrize(
    ("scaling", "change", "field", "becomes"),
    [
        (2.0, {}, "scale", 2.0),
        (1.0, {"sliding_window": 4}, "sliding_window_tokens", 4),
        (1.0, {"softcap": 3.0}, "logit_soft_cap", 3.0),
        (1.0, {"s_aux": torch.tensor([7.0])}, "sinks", (7.0,)),
    ],
)
def test_another_argument_makes_other_options(
    scaling: float, change: dict[str, Any], field: str, becomes: Any
) -> None:
    module = torch.nn.Module()
    arguments = {"sliding_window": 8, "softcap": 50.0, "s_aux": torch.tensor([0.5])}
    first = options_of(module, 1.0, arguments)
    other = options_of(module, scaling, {**arguments, **change})
    assert getattr(other, field) == becomes
    assert getattr(first, field) != becomes


def test_sinks_that_were_changed_in_place_count() -> None:
    module = torch.nn.Module()
    sinks = torch.zeros(2)
    assert options_of(module, 1.0, {"s_aux": sinks}).sinks == (0.0, 0.0)
    sinks.add_(1)
    assert options_of(module, 1.0, {"s_aux": sinks}).sinks == (1.0, 1.0)


def test_a_position_bias_is_refused_at_every_call() -> None:
    module = torch.nn.Module()
    options_of(module, 1.0, {})
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="position bias"):
            options_of(module, 1.0, {"position_bias": torch.zeros(1)})
