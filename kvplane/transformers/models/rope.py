"""RoPE whose frequencies depend on the length of sequences: finds the length from which they do,
and fixes them to those of one length.

transformers chooses the frequencies of LongRoPE and of dynamic NTK by the longest position of a
forward pass. Where sequences share a row, a long one would change the keys of short ones, which
then stay in the pool for everybody. Instead of a list of RoPE types, this calls the model's own
rotary modules with ever longer last positions and compares what the first positions get.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from kvplane.transformers.models import adapters
from kvplane.transformers.models.part import part_of
from kvplane.transformers.models.probe import refusals

_NUM_COLUMNS: Final = 5
_FAR: Final = 2**21
"""A position that exceeds the limit of any config."""

WHY: Final = (
    "with more, the model's RoPE takes other frequencies for the whole forward pass, which would "
    "change the keys of other sequences"
)
"""The reason for the limit, for error texts."""

Embed = Callable[[int], list[torch.Tensor]]


def max_independent_tokens(model: PreTrainedModel) -> int | None:
    """Return the length of the longest sequence, in tokens, whose rotary embeddings depend on no
    other position of its forward pass, nor on an earlier pass; None where no length changes them.

    Raises InvalidRequestError for the field "model" where its forward pass fails. The model's
    attention implementation is "eager" afterwards.
    """
    with part_of(model) as (part, _):
        lengths = [
            _first_dependent(_embedding(copy.deepcopy(module).cpu(), args, kwargs))
            for module, args, kwargs in _rotary_calls(part)
        ]
    return min((length for length in lengths if length is not None), default=None)


def fix_frequencies(model: PreTrainedModel, num_tokens: int) -> None:
    """Make all sequences, of up to ``num_tokens``, use the frequencies of one of that length:
    rotary modules compute one more, last position, which is dropped from their result.
    """

    def lengthen(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        def longer(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_floating_point():
                return value
            return torch.nn.functional.pad(value, (0, 1), value=num_tokens - 1)

        return tree_map(longer, (args, kwargs))

    for module in {module for module, _, _ in _rotary_calls(model)}:
        module.register_forward_pre_hook(lengthen, with_kwargs=True)
        module.register_forward_hook(lambda _, __, output: tree_map(_without_last, output))


def _first_dependent(embed: Embed) -> int | None:
    """Return the least last position that changes the embeddings of others; None if none does.
    Each length is tried after a longer one, whose results a module may keep.
    """
    alone = embed(_NUM_COLUMNS - 1)

    def depends(last: int) -> bool:
        embed(_FAR)
        return not all(map(torch.equal, embed(last), alone))

    try:
        if not depends(_FAR):
            return None
    except IndexError:  # from a table, which has an entry for each position
        return None
    low, high = _NUM_COLUMNS - 1, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if depends(middle) else (middle, high)
    return high


def _rotary_calls(model: PreTrainedModel) -> list[tuple[torch.nn.Module, Any, Any]]:
    """Record the calls of a forward pass that take its positions and use no weights: module,
    arguments and keyword arguments.
    """
    calls: list[tuple[torch.nn.Module, Any, Any]] = []

    def record(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if any(map(_are_positions, (*args, *kwargs.values()))):
            calls.append((module, args, kwargs))

    adapters.set_attention(model, "eager")
    refused = refusals(model, "with eager attention")
    with refused, contextlib.ExitStack() as hooks, torch.inference_mode():
        for module in model.modules():
            if next(module.parameters(), None) is None:
                handle = module.register_forward_pre_hook(record, with_kwargs=True)
                hooks.callback(handle.remove)
        ids = torch.arange(_NUM_COLUMNS, device=model.device).flip(0)[None]
        model(input_ids=ids, use_cache=False)
    return calls


def _embedding(module: torch.nn.Module, args: Any, kwargs: Any) -> Embed:
    """Return a function that computes the embeddings of the positions before a given last one."""

    @torch.inference_mode()
    def embed(last: int) -> list[torch.Tensor]:
        def there(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if _are_positions(value):
                value = value.clone()
                value[..., -1] = last
            return value.cpu().float() if value.is_floating_point() else value.cpu()

        args_there, kwargs_there = tree_map(there, (args, kwargs))
        return tree_leaves(tree_map(_without_last, module(*args_there, **kwargs_there)))

    return embed


def _without_last(embedding: torch.Tensor) -> torch.Tensor:
    """Drop the last position of a [..., positions, frequencies] embedding."""
    return embedding[..., :-1, :]


def _are_positions(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape[-1:] != (_NUM_COLUMNS,):
        return False
    positions = torch.arange(_NUM_COLUMNS, device=value.device)
    return not value.is_floating_point() and bool((value == positions).all())
