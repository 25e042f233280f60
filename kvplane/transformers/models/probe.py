"""Whether a model attends through kvplane as it does through transformers' own eager attention.

A model's attention may have a part that no option expresses, or a layer may have state besides keys
and values. Instead of a list of models, this runs the loaded model's own layers on some 40 tokens
in both ways. Through kvplane two sequences share a row and come in two passes, as in the engine.
Windows are cut to a few tokens for the time of the probe, so that 40 tokens exceed them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.layout import LayerGroup
from kvplane.models.model_layers import layer_groups
from kvplane.transformers import attention
from kvplane.transformers.models import adapters
from kvplane.transformers.models.packed import packed_logits

_WINDOW_TOKENS: Final = 6
_PASSES: Final = (((0, 0, 13), (1, 0, 9)), ((1, 9, 7), (0, 13, 11)))
"""(sequence, first position, number of tokens) of each span."""
_ALONE: Final = (((0, 0, 24),),)
_LENGTHS: Final = (24, 16)
_SMALL: Final = 50_000_000
"""Parameters up to which a model is probed whole, and up to which a part is probed in float32."""
_TOLERANCES: Final = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
"""The largest difference of a logit, as a part of the logits' standard deviation."""

Spans = Sequence[tuple[int, int, int]]


def probe(model: PreTrainedModel, *, latent: bool = True) -> None:
    """Raises InvalidRequestError of the field "model", saying in what way the model cannot be
    served. Its attention implementation is "kvplane" afterwards. ``latent``: as of
    ``layer_groups``.
    """
    try:
        from kvplane.transformers.models.probe_planes import ProbePlanes
    except ImportError as error:
        raise InvalidRequestError(
            f"the probe computes attention in this process and lacks a package ({error.name}): "
            "install kvplane[data-plane], or leave it out with --no-probe",
            field="model",
        ) from error
    with _part_of(model) as (part, num_layers), _short_windows(part):
        groups = _first_layers(layer_groups(part.config, latent=latent), num_layers or None)
        dtype = str(part.dtype).removeprefix("torch.")
        vocabulary = part.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in _LENGTHS]
        wanted = _eager(part, tokens)
        tolerance = _TOLERANCES[part.dtype] * float(wanted.std())
        planes = ProbePlanes(groups, dtype, _LENGTHS)
        difference = _difference(part, planes, tokens, _PASSES, wanted)
        if difference <= tolerance:
            return
        alone = ProbePlanes(groups, dtype, _LENGTHS)
        of_first = wanted[[row for row, (i, _) in enumerate(_rows()) if i == 0][-1:]]
        is_alone_exact = _difference(part, alone, tokens, _ALONE, of_first) <= tolerance
    reason = (
        "its layers keep state besides keys and values, or mix up sequences that share a row"
        if is_alone_exact
        else "its attention has a part that kvplane's options do not express"
    )
    raise InvalidRequestError(
        f"{_type_of(model)} gives other logits through kvplane than through transformers "
        f"({difference:.2g} off, {tolerance:.2g} allowed): {reason}",
        field="model",
    )


def _rows() -> list[tuple[int, int]]:
    """(sequence, position) of each row of logits: the last token of every span."""
    return [(i, first + count - 1) for spans in _PASSES for i, first, count in spans]


def _eager(model: PreTrainedModel, tokens: Sequence[list[int]]) -> torch.Tensor:
    """Float32 logits [rows, vocabulary]: each sequence alone, by transformers' eager attention."""
    adapters.set_attention(model, "eager")
    with torch.inference_mode(), _refusals(model, "with eager attention"):
        of_sequences = [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in tokens
        ]
    return torch.stack([of_sequences[i][position] for i, position in _rows()]).float()


def _difference(
    model: PreTrainedModel,
    planes: Any,
    tokens: Sequence[list[int]],
    passes: Sequence[Spans],
    wanted: torch.Tensor,
) -> float:
    """The largest difference from ``wanted`` of what comes through ``planes``; infinite where it is
    no number.
    """
    adapters.set_attention(model, attention.NAME)
    rows = []
    for spans in passes:
        planes.begin(spans)
        rows.append(_run(model, planes, tokens, spans))
        _check_calls(model, planes)
    difference = float((torch.cat(rows) - wanted).abs().max())
    return difference if difference == difference else float("inf")


def _run(
    model: PreTrainedModel, planes: Any, tokens: Sequence[list[int]], spans: Spans
) -> torch.Tensor:
    ids = [token for i, first, n in spans for token in tokens[i][first : first + n]]
    positions = [position for _, first, n in spans for position in range(first, first + n)]
    ends = torch.tensor([n for _, _, n in spans]).cumsum(0)
    with _refusals(model, "on two sequences in one row"):
        return packed_logits(model, ids, positions, (ends - 1).tolist(), planes)


@contextlib.contextmanager
def _refusals(model: PreTrainedModel, how: str) -> Iterator[None]:
    """A model's own code raises what it likes."""
    try:
        yield
    except KvplaneError as error:
        raise InvalidRequestError(f"{_type_of(model)}: {error.message}", field="model") from error
    except Exception as error:
        raise InvalidRequestError(
            f"{_type_of(model)} fails {how}: {type(error).__name__}: {error}", field="model"
        ) from error


def _check_calls(model: PreTrainedModel, planes: Any) -> None:
    if not planes.num_calls:
        raise InvalidRequestError(
            f"{_type_of(model)} computes attention in its own code, not by transformers' "
            "AttentionInterface",
            field="model",
        )
    missing = sorted(planes.layers - set(planes.num_calls))
    if missing:
        raise InvalidRequestError(
            f"{_type_of(model)}: layer {missing[0]} calls no attention", field="model"
        )


@contextlib.contextmanager
def _part_of(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, int]]:
    """The model, with the first layers only where it is large, and how many layers that is. A small
    part in half precision is copied to float32, in which differences are no rounding errors.
    """
    layers = _layers(model)
    whole = list(layers)
    small = sum(p.numel() for p in model.parameters()) <= _SMALL
    if not small and whole:
        del layers[_num_distinct(whole) :]
    num_layers = len(layers)
    try:
        is_half = model.dtype in (torch.float16, torch.bfloat16)
        is_quantised = getattr(model, "hf_quantizer", None) is not None
        num_parameters = sum(p.numel() for p in model.parameters())
        if is_half and not is_quantised and num_parameters <= _SMALL:
            yield copy.deepcopy(model).float(), num_layers
        else:
            yield model, num_layers
    finally:
        layers.extend(whole[num_layers:])
        adapters.set_attention(model, attention.NAME)


def _layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers; an empty list where none is as long as the config says."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    return torch.nn.ModuleList()


def _num_distinct(layers: Sequence[torch.nn.Module]) -> int:
    """How many first layers hold one of each kind, at least two."""
    kinds = [
        tuple((name, type(module).__name__) for name, module in layer.named_modules())
        + tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        + tuple(_windows(layer))
        for layer in layers
    ]
    return max(2, max(kinds.index(kind) for kind in kinds) + 1)


def _windows(layer: torch.nn.Module) -> list[Any]:
    return [getattr(module, "sliding_window", None) for module in layer.modules()]


def _first_layers(groups: Sequence[LayerGroup], num_layers: int | None) -> list[LayerGroup]:
    """``num_layers``: None for all."""
    if num_layers is None:
        return list(groups)
    cut = [
        replace(group, layers=tuple(layer for layer in group.layers if layer < num_layers))
        for group in groups
    ]
    return [group for group in cut if group.layers]


@contextlib.contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Windows of ``_WINDOW_TOKENS`` where the config and the layers have longer ones."""
    holders: list[Any] = [model.config.get_text_config(decoder=True), *model.modules()]
    holders = [h for h in holders if isinstance(getattr(h, "sliding_window", None), int)]
    before = [(holder, holder.sliding_window) for holder in holders]
    for holder, window in before:
        holder.sliding_window = min(window, _WINDOW_TOKENS)
    try:
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


def _type_of(model: PreTrainedModel) -> str:
    return f"a model of type {model.config.model_type!r}"
