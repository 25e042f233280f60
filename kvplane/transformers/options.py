"""What a transformers model says of a layer's attention, as AttentionOptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

_KEPT: Final = "_kvplane_options"


@dataclass(frozen=True, slots=True)
class _Kept:
    """Options with what they were made of. Sinks and slopes are a layer's parameters: compared by
    identity and count of changes, because comparing values would cost more than making options.
    """

    numbers: tuple[float, ...]
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    options: AttentionOptions


def options_of(
    module: torch.nn.Module, scaling: float | None, arguments: Mapping[str, Any]
) -> AttentionOptions:
    """The options of an attention call of ``module``, made at its first call and kept there.

    ``scaling`` and ``arguments``, the call's other keyword arguments, are named by transformers.
    ALiBi slopes, float32 [num_heads], are an attribute of the module, "alibi_slopes", because
    transformers has no argument for them. Raises InvalidRequestError for a position bias, which no
    option expresses.
    """
    if arguments.get("position_bias") is not None:
        raise InvalidRequestError("attention has a position bias", field="model")
    scale = float(scaling or 0.0)
    window = arguments.get("sliding_window") or 0
    soft_cap = float(arguments.get("softcap") or 0.0)
    sinks, slopes = arguments.get("s_aux"), _slopes(module)
    num_changes = _num_changes(sinks), _num_changes(slopes)
    numbers: tuple[float, ...] = (scale, window, soft_cap, *num_changes)
    kept: _Kept | None = module.__dict__.get(_KEPT)
    if (
        kept is None
        or kept.numbers != numbers
        or kept.sinks is not sinks
        or kept.slopes is not slopes
    ):
        options = AttentionOptions(
            scale=scale,
            sliding_window_tokens=window,
            alibi_slopes=_floats(slopes),
            sinks=_floats(sinks),
            logit_soft_cap=soft_cap,
        )
        kept = _Kept(numbers, sinks, slopes, options)
        setattr(module, _KEPT, kept)
    return kept.options


def _slopes(module: torch.nn.Module) -> torch.Tensor | None:
    """As an attribute or a buffer. To ask a module for what it lacks takes microseconds."""
    own = module.__dict__
    slopes: torch.Tensor | None = own.get("alibi_slopes")
    return own.get("_buffers", own).get("alibi_slopes") if slopes is None else slopes


def _num_changes(tensor: torch.Tensor | None) -> int:
    """In place, since the tensor was made. Torch does not count those of inference tensors."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _floats(tensor: torch.Tensor | None) -> tuple[float, ...]:
    return () if tensor is None else tuple(tensor.detach().float().flatten().tolist())
