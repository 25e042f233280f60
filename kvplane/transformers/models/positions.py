"""Gives learned and sinusoidal position embeddings the positions of the pass's tokens.

Most models look up ``position_ids`` as they are. Two kinds of code don't:

* RoBERTa's counts from ``padding_idx + 1``, but only where it makes the positions itself. Its
  method ``create_position_ids_from_input_ids`` tells the first one.
* BART's decoder counts the columns of a row, so that sequences that share a row would get wrong
  positions. Its embedding takes ``position_ids``, but its model does not.

Hooks give them the right ones while attention is "kvplane", and do nothing otherwise. No model is
named here: the probe refuses those whose positions come in yet another way.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvplane.transformers import attention

_ATTRIBUTE: Final = "_kvplane_positions"
_NAME: Final = "position_ids"
_MAKE: Final = "create_position_ids_from_input_ids"


@dataclass
class _Positions:
    """Shared by the modules of a model: its config, the first position, and the positions of the
    running pass, int64 [num_rows, num_columns].
    """

    config: PreTrainedConfig
    first: int = 0
    given: torch.Tensor | None = None

    @property
    def is_wanted(self) -> bool:
        return bool(self.config._attn_implementation == attention.NAME)


def adapt_positions(model: PreTrainedModel) -> None:
    """Hook the modules of ``model`` that need it. Harmless when called again."""
    if _ATTRIBUTE in model.__dict__:
        return
    positions = _Positions(model.config)
    for module in list(model.modules())[1:]:
        if not _takes_positions(module):
            continue
        if hasattr(module, _MAKE):
            positions.first = _first_position(module)
        elif not isinstance(module, torch.nn.Embedding) or _takes_positions(model):
            continue
        if hasattr(module, _MAKE):
            _hook(module, positions, _move)
        else:
            _hook(module, positions, _replace)
            module.register_forward_hook(_in_rows)
    setattr(model, _ATTRIBUTE, positions)


def first_position(model: PreTrainedModel) -> int:
    """Return the number that ``model`` gives the first token of a sequence, once adapted."""
    positions: _Positions = getattr(model, _ATTRIBUTE)
    return positions.first


def give_positions(model: PreTrainedModel, position_ids: torch.Tensor) -> None:
    """Say before a forward pass of ``model`` which positions, int64 [num_rows, num_columns], its
    tokens have.
    """
    positions: _Positions | None = model.__dict__.get(_ATTRIBUTE)
    if positions is not None:
        positions.given = position_ids


def _hook(module: torch.nn.Module, positions: _Positions, hook: Any) -> None:
    setattr(module, _ATTRIBUTE, positions)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _move(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Let the positions that RoBERTa's code is given begin with the first."""
    positions: _Positions = getattr(module, _ATTRIBUTE)
    given = kwargs.get(_NAME)
    if not positions.is_wanted or given is None:
        return None
    return args, {**kwargs, _NAME: given + positions.first}


def _replace(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give an embedding the positions of all rows' tokens, one after another."""
    positions: _Positions = getattr(module, _ATTRIBUTE)
    if not positions.is_wanted or positions.given is None:
        return None
    return args, {**kwargs, _NAME: positions.given.flatten()}


def _in_rows(module: Any, _: Any, embedding: torch.Tensor) -> torch.Tensor:
    """Return the embedding of flat positions as [num_rows, num_columns, size]."""
    positions: _Positions = getattr(module, _ATTRIBUTE)
    if not positions.is_wanted or positions.given is None:
        return embedding
    return embedding.view(*positions.given.shape, -1)


def _takes_positions(module: torch.nn.Module) -> bool:
    return _NAME in inspect.signature(module.forward).parameters


def _first_position(module: Any) -> int:
    """Ask RoBERTa's code for the position of a token that is no padding."""
    token = torch.tensor([[module.padding_idx + 1]])
    return int(getattr(module, _MAKE)(token, module.padding_idx)[0, 0])
