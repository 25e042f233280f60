"""Checks that a model attends through kvplane as through an attention of transformers' own.

A model's attention may have a part that no option expresses, or a layer may have state besides keys
and values. Instead of a list of models, this runs the loaded model's own layers on some 40 tokens
in both ways. Through kvplane two sequences share a row and come in two passes, as in the engine.
Where transformers' cache of the model has running states, each sequence has a row of its own: one
continues from a checkpoint, after which both come in one pass, as in the engine too. Windows are
cut to a few tokens for the time of the probe, so that 40 tokens exceed them.
"""

from __future__ import annotations

import contextlib
import weakref
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
from kvplane.transformers.models.packed import packed_logits, row_logits
from kvplane.transformers.models.part import WINDOW_TOKENS, part_of, short_windows
from kvplane.transformers.states import StateCache, States, find_states, may_keep_states

_PASSES: Final = (((0, 0, 13), (1, 0, 9)), ((1, 9, 7), (0, 13, 11)))
"""The spans of each pass of the probe: (sequence, first position, number of tokens)."""
_ALONE: Final = (((0, 0, 24),),)
_WITH_STATES: Final = (((0, 0, 16),), ((1, 0, 15),), ((0, 16, 7),), ((0, 23, 1), (1, 15, 1)))
"""The same of a model with running states: in one pass rows have equally many tokens."""
_LENGTHS: Final = (24, 16)
_TOLERANCES: Final = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
"""The largest allowed difference of a logit, as a part of the logits' standard deviation."""
_QUANTISED_TOLERANCE: Final = 0.2
"""Tolerance for activations rounded to a few bits, where a small difference may be a step."""

Spans = Sequence[tuple[int, int, int]]
_Shapes = list[LayerShape | None]
_STATES: Final[weakref.WeakKeyDictionary[PreTrainedModel, tuple[States | None]]] = (
    weakref.WeakKeyDictionary()
)


def probe(model: PreTrainedModel, *, latent: bool = True) -> tuple[LayerGroup, ...]:
    """Return the layer groups with which the model's logits are right: those of its config or, if
    these are wrong, those of its attention calls. ``latent``: see ``layer_groups``. A model whose
    layers don't call attention once each is run whole, and its calls are counted from then on.

    Raises InvalidRequestError for the field "model", saying in what way the model cannot be served.
    Its attention implementation is "kvplane" afterwards.
    """
    try:
        of_config = layer_shapes(model.config, latent=latent)
        states = states_of(model)
        if not attention.counts_calls(model):
            try:
                with part_of(model) as (part, num_layers):
                    groups = groups_of(_exact_shapes(part, num_layers, of_config))
                return with_states(groups, states)
            except attention.OtherCallsError:
                attention.count_calls(model)
        with part_of(model, is_whole=True) as (part, _):
            groups = groups_of(_exact_shapes(part, None, of_config))
        return with_states(groups, states)
    finally:
        adapters.set_attention(model, attention.NAME)


def states_of(model: PreTrainedModel) -> States | None:
    """Return the running states of a model's layers, found by running it; None if it has none. Else
    its attention implementation is "kvplane" afterwards. Raises InvalidRequestError for a model
    that does not run with a cache of transformers' own.
    """
    known = _STATES.get(model)
    if known is None:
        is_hybrid = may_keep_states(model.config)
        if is_hybrid:
            adapters.set_attention(model, adapters.reference(model))
        with refusals(model, "with transformers' own cache"):
            known = _STATES[model] = (find_states(model) if is_hybrid else None,)
        if is_hybrid:
            adapters.set_attention(model, attention.NAME)
    return known[0]


def with_states(groups: tuple[LayerGroup, ...], states: States | None) -> tuple[LayerGroup, ...]:
    """Return the layer groups of attention, and after them that of running states, if any."""
    return groups if states is None else (*groups, states.group)


def _exact_shapes(part: PreTrainedModel, num_layers: int | None, of_config: _Shapes) -> _Shapes:
    tokens = _tokens(part)
    states = states_of(part)
    if states is not None and num_layers is not None:
        states = states.of_first(num_layers)
    passes = _PASSES if states is None else _WITH_STATES
    adapters.set_attention(part, attention.NAME)
    with refusals(part):
        runs = _Runs(part, tokens, states)
        measured = _measure(lambda step: runs.run(step, passes[0]), num_layers, of_config)
    with short_windows(part):
        wanted = _reference(part, tokens, passes)
        tolerance = _tolerance(part) * float(wanted.std())
        for shapes in _candidates(of_config, measured):
            runs = _Runs(part, tokens, states)
            difference = _difference(runs, shapes[:num_layers], passes, wanted)
            if difference <= tolerance:
                return shapes
        of_first = wanted[[row for row, (i, _) in enumerate(_rows(passes)) if i == 0][-1:]]
        runs = _Runs(part, tokens, states)
        alone = _difference(runs, shapes[:num_layers], _ALONE, of_first)
    reason = (
        "passes of several tokens do not continue its running states"
        if alone <= tolerance and states is not None
        else "its layers keep state besides keys and values, or mix up sequences that share a row"
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


def _candidates(of_config: _Shapes, measured: _Shapes) -> list[_Shapes]:
    """Return the shapes of layers to try: the config's first, because a window may be in the mask
    alone, but not if its sizes differ from those measured.
    """
    if _with_windows(of_config, 0) != _with_windows(measured, 0):
        return [measured]
    return [of_config] if measured == of_config else [of_config, measured]


def _with_windows(shapes: Sequence[LayerShape | None], most: int) -> _Shapes:
    """Return shapes whose windows are at most so many tokens."""
    return [s and replace(s, window_tokens=min(s.window_tokens, most)) for s in shapes]


def _rows(passes: Sequence[Spans]) -> list[tuple[int, int]]:
    """Return (sequence, position) for each row of logits: the last token of every span."""
    return [(i, first + count - 1) for spans in passes for i, first, count in spans]


def _reference(
    model: PreTrainedModel, tokens: Sequence[list[int]], passes: Sequence[Spans]
) -> torch.Tensor:
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
    logits = torch.stack([of_sequences[i][position] for i, position in _rows(passes)]).float()
    if not bool(logits.isfinite().all()):
        raise InvalidRequestError(
            f"{_type_of(model)} gives NaN or infinity with transformers' own attention: its weights"
            f" hold such values, or are too large for {model.dtype}",
            field="model",
        )
    return logits


def _difference(
    runs: _Runs, shapes: _Shapes, passes: Sequence[Spans], wanted: torch.Tensor
) -> float:
    """Return the largest difference between kvplane's logits, where layers have ``shapes``, and
    ``wanted``; infinite for NaN.
    """
    try:
        from kvplane.runtime.probe_planes import ProbePlanes
    except ImportError as error:
        raise InvalidRequestError(
            f"the probe computes attention in this process, but {what_is_missing(error)}: "
            "install kvplane[data-plane], or leave it out with probe=False, or --no-probe",
            field="model",
        ) from error
    short, model = _with_windows(shapes, WINDOW_TOKENS), runs.model
    dtype = str(model.dtype).removeprefix("torch.")
    adapters.set_attention(model, attention.NAME)
    with refusals(model):
        planes = ProbePlanes(groups_of(short), dtype, _LENGTHS)
        rows = []
        for spans in passes:
            planes.begin(spans)
            rows.append(runs.run(planes, spans))
    difference = float((torch.cat(rows) - wanted).abs().max())
    return difference if difference == difference else float("inf")


class _Runs:
    """Forward passes of a model over ``tokens`` of each sequence. ``states``: None if its layers
    keep none; then the sequences of a pass share a row.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: Sequence[list[int]], states: States | None
    ) -> None:
        self.model = model
        self._tokens = tokens
        self._states = states
        self._pages: dict[int, torch.Tensor] = {}  # of each sequence's last token

    def run(self, step: attention.Step, spans: Spans) -> torch.Tensor:
        """Compute float32 logits [spans, vocabulary] by ``step``, after each span's last token."""
        ids = [self._tokens[i][first : first + n] for i, first, n in spans]
        if self._states is not None:
            return self._run_rows(step, spans, ids, self._states)
        positions = [position for _, first, n in spans for position in range(first, first + n)]
        ends = torch.tensor([n for _, _, n in spans]).cumsum(0)
        flat = [token for each in ids for token in each]
        return packed_logits(self.model, flat, positions, (ends - 1).tolist(), step)

    def _run_rows(
        self, step: attention.Step, spans: Spans, ids: Sequence[list[int]], states: States
    ) -> torch.Tensor:
        cache = StateCache(self.model, states)
        first_positions = [first for _, first, _ in spans]
        if any(first_positions):
            cache.restore(torch.cat([self._pages[i] for i, _, _ in spans], dim=1))
        logits = row_logits(self.model, ids, first_positions, cache, step)
        for row, (i, _, _) in enumerate(spans):
            self._pages[i] = cache.pages()[:, row : row + 1]
        return logits


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
    of_config: Sequence[LayerShape | None],
) -> _Shapes:
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
    expected = {i for i, shape in enumerate(of_config[:num_layers]) if shape is not None}
    if missing := sorted(expected - set(found)):
        raise attention.OtherCallsError(f"layer {missing[0]} calls no attention", field="model")
    if unknown := sorted(set(found) - set(range(num_layers))):
        raise attention.OtherCallsError(
            f"a layer calls attention as number {unknown[0]}, which its config does not have",
            field="model",
        )
    like = {of_config[index]: found[index] for index in sorted(expected, reverse=True)}
    return [
        found.get(index) or (shape and like.get(shape, shape))
        for index, shape in enumerate(of_config)
    ]


class Recorder:
    """A step that records the shape of each layer's call by its index, and returns zeros."""

    def __init__(self, of_config: Sequence[LayerShape | None]) -> None:
        self._of_config = of_config
        self.shapes: dict[int, LayerShape] = {}

    @property
    def latent_layers(self) -> frozenset[int]:
        return frozenset(i for i, s in enumerate(self._of_config) if s and s.cache_kind == LATENT)

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
            of_config = self._of_config[index]
            kind, value_size = LATENT, of_config.value_head_size if of_config else 0
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
