"""Attention of a transformers model, computed by a data plane.

Transformers calls attention by name through its AttentionInterface. The name "kvplane" passes q, k
and v of each layer to the step that runs now, which a context variable holds, and returns that
step's output. The mask of that name is None on purpose: a plan's spans say which positions a token
sees, so there is nothing left to mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvplane.attention_options import AttentionOptions

NAME: Final = "kvplane"


class Step(Protocol):
    """What runs a plan, one layer after another."""

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, both [num_tokens, num_kv_heads, head_size], and attend from
        ``query``, [num_tokens, num_heads, head_size]; returns [num_tokens, num_heads, the
        values' head_size].
        """
        ...


_RUNNING: ContextVar[Step] = ContextVar("kvplane_running_step")


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """Attention inside this block goes to ``step``."""
    token = _RUNNING.set(step)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def register() -> None:
    """Register "kvplane" with transformers. May be called again."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query [1, num_heads, T, D], key and value [1, num_kv_heads, T, D] after RoPE; returns [1, T,
    num_heads, D].
    """
    index = module.layer_idx
    if not isinstance(index, int):
        raise TypeError(f"layer_idx of {type(module).__name__} is {index!r}, not an int")
    out = _RUNNING.get().layer(
        index,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options=AttentionOptions(scaling or 0.0, sliding_window or 0),
    )
    return out.unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
