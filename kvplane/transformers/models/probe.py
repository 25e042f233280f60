"""Checks that a model attends through kvplane as through an attention of transformers' own.

A model's attention may have a part that no option expresses, or a layer may have state besides keys
and values. Instead of a list of models, this runs the loaded model's own layers on some 40 tokens
in both ways. Through kvplane two sequences share a row and come in two passes, as in the engine.
Windows are cut to a few tokens for the time of the probe, so that 40 tokens exceed them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from transformers import PreTrainedModel

from kvplane.attention_options import AttentionOptions
from kvplane.cli.extras import what_is_missing
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.layout import KEYS_AND_VALUES, LATENT, LayerGroup
from kvplane.models.model_layers import LayerShape, groups_of, layer_shapes
from kvplane.transformers import attention
from kvplane.transformers.models import adapters
from kvplane.transformers.models.packed import packed_logits
from kvplane.transformers.models.part import WINDOW_TOKENS, part_of, short_windows

_PASSES: Final = (((0, 0, 13), (1, 0, 9)), ((1, 9, 7), (0, 13, 11)))
"""The spans of each pass of the probe: (sequence, first position, number of tokens)."""
_ALONE: Final = (((0, 0, 24),),)
_LENGTHS: Final = (24, 16)
_TOLERANCES: Final = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
"""The largest allowed difference of a logit, as a part of the logits' standard deviation."""
_QUANTISED_TOLERANCE: Final = 0.2
"""Tolerance for activations rounded to a few bits, where a small difference may be a step."""

Spans = Sequence[tuple[int, int, int]]


def probe(model: PreTrainedModel, *, latent: bool = True) -> tuple[LayerGroup, ...]:
    """Return the layer groups with which the model's logits are right: those of its config or, if
    these are wrong, those of its attention calls. ``latent``: see ``layer_groups``. A model whose
    layers don't call attention once each is run whole, and its calls are counted from then on.

    Raises InvalidRequestError for the field "model", saying in what way the model cannot be served.
    Its attention implementation is "kvplane" afterwards.
    """
    try:
        of_config = layer_shapes(model.config, latent=latent)
        if not attention.counts_calls(model):
            try:
                with part_of(model) as (part, num_layers):
                    return groups_of(_exact_shapes(part, num_layers, of_config))
            except attention.OtherCallsError:
                attention.count_calls(model)
        with part_of(model, is_whole=True) as (part, _):
            return groups_of(_exact_shapes(part, None, of_config))
    finally:
        adapters.set_attention(model, attention.NAME)


def _exact_shapes(
    part: PreTrainedModel, num_layers: int | None, of_config: list[LayerShape]
) -> list[LayerShape]:
    tokens = _tokens(part)
    adapters.set_attention(part, attention.NAME)
    with refusals(part):
        measured = _measure(
            lambda step: _run(part, step, tokens, _PASSES[0]), num_layers, of_config
        )
    with short_windows(part):
        wanted = _reference(part, tokens)
        tolerance = _tolerance(part) * float(wanted.std())
        for shapes in _candidates(of_config, measured):
            difference = _difference(part, shapes[:num_layers], tokens, _PASSES, wanted)
            if difference <= tolerance:
                return shapes
        of_first = wanted[[row for row, (i, _) in enumerate(_rows()) if i == 0][-1:]]
        alone = _difference(part, shapes[:num_layers], tokens, _ALONE, of_first)
    reason = (
        "its layers keep state besides keys and values, or mix up sequences that share a row"
        if alone <= tolerance
        else "its attention has a part that kvplane's options do not express"
    )
    raise InvalidRequestError(
        f"{_type_of(part)} gives other logits through kvplane than through transformers "
        f"({difference:.2g} off, {tolerance:.2g} allowed): {reason}",
        field="model",
    )


def _tokens(model: PreTrainedModel) -> list[list[int]]:
    """Draw two sequences without padding, because RoBERTa counts no position for it."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config(decoder=True)
    padding = getattr(config, "pad_token_id", None)
    drawn = [torch.randint(config.vocab_size, (n,), generator=generator) for n in _LENGTHS]
    return [[int(padding == 0) if i == padding else i for i in row.tolist()] for row in drawn]


def _tolerance(model: PreTrainedModel) -> float:
    """Return how much logits may differ, in standard deviations of the logits."""
    is_quantised = getattr(model, "hf_quantizer", None) is not None
    return max(_TOLERANCES[model.dtype], _QUANTISED_TOLERANCE * is_quantised)


def _candidates(of_config: list[LayerShape], measured: list[LayerShape]) -> list[list[LayerShape]]:
    """Return the shapes of layers to try: the config's first, because a window may be in the mask
    alone, but not if its sizes differ from those measured.
    """
    has_own_sizes = [replace(shape, window_tokens=0) for shape in of_config] != [
        replace(shape, window_tokens=0) for shape in measured
    ]
    if has_own_sizes:
        return [measured]
    return [of_config] if measured == of_config else [of_config, measured]


def _rows() -> list[tuple[int, int]]:
    """Return (sequence, position) for each row of logits: the last token of every span."""
    return [(i, first + count - 1) for spans in _PASSES for i, first, count in spans]


def _reference(model: PreTrainedModel, tokens: Sequence[list[int]]) -> torch.Tensor:
    """Compute float32 logits [rows, vocabulary], each sequence alone, by transformers' attention.
    Raises InvalidRequestError where they are not finite.
    """
    name = adapters.reference(model)
    adapters.set_attention(model, name)
    with torch.inference_mode(), refusals(model, f"with {name} attention"):
        of_sequences = [
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
            for ids in tokens
        ]
    logits = torch.stack([of_sequences[i][position] for i, position in _rows()]).float()
    if not bool(logits.isfinite().all()):
        raise InvalidRequestError(
            f"{_type_of(model)} gives NaN or infinity with transformers' own attention: its weights"
            f" hold such values, or are too large for {model.dtype}",
            field="model",
        )
    return logits


def _difference(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    tokens: Sequence[list[int]],
    passes: Sequence[Spans],
    wanted: torch.Tensor,
) -> float:
    """Return the largest difference between kvplane's logits, where layers have ``shapes``, and
    ``wanted``; infinite for NaN.
    """
    try:
        from kvplane.runtime.probe_planes import ProbePlanes
    except ImportError as error:
        raise InvalidRequestError(
            f"the probe computes attention in this process, but {what_is_missing(error)}: "
            "install kvplane[data-plane], or leave it out with --no-probe",
            field="model",
        ) from error
    short = [replace(s, window_tokens=min(s.window_tokens, WINDOW_TOKENS)) for s in shapes]
    dtype = str(model.dtype).removeprefix("torch.")
    adapters.set_attention(model, attention.NAME)
    with refusals(model):
        planes = ProbePlanes(groups_of(short), dtype, _LENGTHS)
        rows = []
        for spans in passes:
            planes.begin(spans)
            rows.append(_run(model, planes, tokens, spans))
    difference = float((torch.cat(rows) - wanted).abs().max())
    return difference if difference == difference else float("inf")


def _run(
    model: PreTrainedModel, step: attention.Step, tokens: Sequence[list[int]], spans: Spans
) -> torch.Tensor:
    """Compute float32 logits [spans, vocabulary] by ``step``, after the last token of each span."""
    ids = [token for i, first, n in spans for token in tokens[i][first : first + n]]
    positions = [position for _, first, n in spans for position in range(first, first + n)]
    ends = torch.tensor([n for _, _, n in spans]).cumsum(0)
    return packed_logits(model, ids, positions, (ends - 1).tolist(), step)


@contextlib.contextmanager
def refusals(model: PreTrainedModel, how: str = "on two sequences in one row") -> Iterator[None]:
    """Convert errors of a model's own code, inside the context, to InvalidRequestError."""
    try:
        yield
    except attention.OtherCallsError:
        raise
    except KvplaneError as error:
        raise InvalidRequestError(f"{_type_of(model)}: {error.message}", field="model") from error
    except Exception as error:
        raise InvalidRequestError(
            f"{_type_of(model)} fails {how}: {type(error).__name__}: {error}", field="model"
        ) from error


def _type_of(model: PreTrainedModel) -> str:
    return f"a model of type {model.config.model_type!r}"


def _measure(
    run: Callable[[attention.Step], object],
    num_layers: int | None,
    of_config: Sequence[LayerShape],
) -> list[LayerShape]:
    """Return the shape of each layer's attention call, which may differ from its config. ``run``
    makes a forward pass of the first ``num_layers``; a later layer has the shape measured for the
    first layer with its shape in ``of_config``. None: of a whole model whose calls are counted.

    Raises OtherCallsError unless every layer that ran calls attention once.
    """
    recorder = Recorder(of_config)
    run(recorder)
    found = recorder.shapes
    if not found:
        raise InvalidRequestError(
            "computes attention in its own code, not by transformers' AttentionInterface",
            field="model",
        )
    if num_layers is None:
        return [found[call] for call in sorted(found)]
    if missing := sorted(set(range(num_layers)) - set(found)):
        raise attention.OtherCallsError(f"layer {missing[0]} calls no attention", field="model")
    if unknown := sorted(set(found) - set(range(num_layers))):
        raise attention.OtherCallsError(
            f"a layer calls attention as number {unknown[0]}, which its config does not have",
            field="model",
        )
    like = {of_config[index]: found[index] for index in reversed(range(num_layers))}
    return [found.get(index) or like.get(shape, shape) for index, shape in enumerate(of_config)]


class Recorder:
    """A step that records the shape of each layer's call by its index, and returns zeros."""

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
            raise attention.OtherCallsError(f"layer {index} calls attention twice", field="model")
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
