"""One rank's part of a model: the linear layers that transformers' own plan for tensor parallelism
names, cut by heads in attention and evenly elsewhere.

A layer cut by columns gives a part of the features, the one cut by rows after it takes that part
and gives a part of a sum, which all ranks add up. Everything else is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.shard import QueryHeads, Shard

from .group import RankGroup

_COLUMNS: Final = "colwise"
_ROWS: Final = "rowwise"
_WHOLE: Final = "replicated_with_grad_allreduce"
_OF_KEYS: Final = ("k_proj", "v_proj")


def shards_of(layout: Layout, num_ranks: int) -> list[Shard]:
    """Return which part of the pool each rank has. Raises InvalidRequestError for the field
    "tensor_parallel" when the heads cannot be divided among the ranks.
    """
    try:
        shards = [Shard.of_heads(layout, rank, num_ranks) for rank in range(num_ranks)]
        for shard in shards:
            shard.layers(layout)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field="tensor_parallel") from error
    return shards


def keep_part(model: PreTrainedModel, layout: Layout, group: RankGroup) -> None:
    """Cut ``model`` in place to the part of this rank. Raises InvalidRequestError for the field
    "tensor_parallel" for a model without such a plan, or with other ways to cut, and if the pool
    keeps latents.
    """
    if layout.latent_layers:
        raise InvalidRequestError(
            "latents are of all heads together, and not divided among ranks",
            field="tensor_parallel",
        )
    plan, shards = _plan(model), shards_of(layout, group.num_ranks)
    modules = dict(model.get_decoder().named_modules())
    heads = {
        name.removesuffix(".q_proj"): _heads_of(name, modules, layout, shards, group.rank)
        for name in modules
        if name.endswith(".q_proj")
    }
    if len(heads) != layout.num_layers:
        raise InvalidRequestError(
            "the model's attention has other layers than q_proj, k_proj and v_proj",
            field="tensor_parallel",
        )
    for name, module in modules.items():
        cut = next((way for pattern, way in plan.items() if re.fullmatch(pattern, name)), _WHOLE)
        parent, _, leaf = name.rpartition(".")
        if cut == _WHOLE:
            continue
        if parent in heads:
            part = heads[parent].keys if leaf in _OF_KEYS else heads[parent].queries
        else:
            part = _Part([range(group.rank, group.rank + 1)], group.num_ranks)
        if cut == _COLUMNS:
            _cut_columns(module, part)
        else:
            _cut_rows(module, part, group)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a layer's features: the pieces in ``ranges`` of ``num`` equal pieces."""

    ranges: list[range]
    num: int

    def of(self, num_features: int) -> torch.Tensor:
        """Return the indices of the part's features, int64, ascending."""
        size, rest = divmod(num_features, self.num)
        if rest:
            raise InvalidRequestError(
                f"must divide the model's layers of {num_features} features",
                field="tensor_parallel",
            )
        return torch.cat([torch.arange(x.start * size, x.stop * size) for x in self.ranges])


class _Heads(NamedTuple):
    """The query heads and the KV heads of one attention module that this rank computes."""

    queries: _Part
    keys: _Part


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of the decoder, by regular expression."""
    plan: Mapping[str, str] = model.config.get_text_config(decoder=True).base_model_tp_plan or {}
    if not plan:
        raise InvalidRequestError(
            "transformers has no plan for tensor parallelism of this model", field="tensor_parallel"
        )
    others = sorted({*plan.values()} - {_COLUMNS, _ROWS, _WHOLE})
    if others:
        raise InvalidRequestError(
            f"transformers' plan for this model cuts layers as {', '.join(others)}, which is not "
            "served",
            field="tensor_parallel",
        )
    return {re.escape(name).replace(r"\*", r"\d+"): way for name, way in plan.items()}


def _heads_of(
    name: str, modules: Mapping[str, Any], layout: Layout, shards: Sequence[Shard], rank: int
) -> _Heads:
    """Return the heads of an attention module on this rank. ``name``: of its q_proj."""
    layer = modules[name.removesuffix(".q_proj")].layer_idx
    index = next(i for i, group in enumerate(layout.groups) if layer in group.layers)
    group, shard = layout.groups[index], shards[rank]
    num_heads = modules[name].out_features // group.head_size
    queries = QueryHeads.of(shard, shards, layout, index).ranges(num_heads)
    keys = [shard.kv_heads(layout, index)]
    return _Heads(_Part(queries, num_heads), _Part(keys, group.num_kv_heads))


def _cut_columns(module: nn.Linear, part: _Part) -> None:
    kept = part.of(module.out_features)
    module.weight = _frozen(module.weight[kept])
    if module.bias is not None:
        module.bias = _frozen(module.bias[kept])
    module.out_features = len(kept)


def _cut_rows(module: nn.Linear, part: _Part, group: RankGroup) -> None:
    kept = part.of(module.in_features)
    module.weight = _frozen(module.weight[:, kept])
    if group.rank > 0:
        module.register_parameter("bias", None)  # it is added once
    module.in_features = len(kept)
    module.register_forward_hook(lambda _, __, output: group.add_up(output.contiguous()))


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)
