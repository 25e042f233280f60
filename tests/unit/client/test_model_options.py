"""What a model's attention calls become: options that are made once for equal calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplane.attention_options import AttentionOptions
from kvplane.transformers.attention import options_of


def options(**given: Any) -> AttentionOptions:
    plain: dict[str, Any] = {
        "scale": 1.0, "window": 8, "soft_cap": 50.0, "sinks": torch.tensor([0.5]), "slopes": None
    }  # fmt: skip
    return options_of(**(plain | given))


def test_the_arguments_of_a_call_become_options() -> None:
    sinks, slopes = torch.tensor([0.5, -1.0]), torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    assert options(scale=0.25, sinks=sinks, slopes=slopes) == AttentionOptions(
        scale=0.25,
        sliding_window_tokens=8,
        logit_soft_cap=50.0,
        sinks=(0.5, -1.0),
        alibi_slopes=(0.5, 0.25),
    )
    assert options_of(0.0, 0, 0.0, None, None) == AttentionOptions()


def test_equal_options_are_made_once() -> None:
    sinks = torch.nn.Parameter(torch.ones(64))
    assert options(sinks=sinks) is options(sinks=sinks)


@pytest.mark.parametrize(
    ("change", "field", "becomes"),
    [
        ({"scale": 2.0}, "scale", 2.0),
        ({"window": 4}, "sliding_window_tokens", 4),
        ({"soft_cap": 3.0}, "logit_soft_cap", 3.0),
        ({"sinks": torch.tensor([7.0])}, "sinks", (7.0,)),
    ],
)
def test_another_argument_makes_other_options(
    change: dict[str, Any], field: str, becomes: Any
) -> None:
    first = options()
    other = options(**change)
    assert getattr(other, field) == becomes
    assert getattr(first, field) != becomes


def test_sinks_that_were_changed_in_place_count() -> None:
    sinks = torch.zeros(2)
    assert options(sinks=sinks).sinks == (0.0, 0.0)
    sinks.add_(1)
    assert options(sinks=sinks).sinks == (1.0, 1.0)
