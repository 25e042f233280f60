"""Attention of a transformers model, computed by a data plane.

Transformers calls attention by name through its AttentionInterface. The name "kvplane" is one
operator of torch, ``kvplane::attention``: torch.compile takes it into its graph as it is, and knows
its output's shape. When it runs, it passes q, k and v of the layer to the step that runs now, which
a context variable holds, and returns that step's output. The mask of that name is None on purpose:
a plan's spans say which positions a token sees, so there is nothing left to mask. The model's
arguments for a layer's attention are passed on as AttentionOptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.transformers import absorbed

NAME: Final = "kvplane"
_QUALIFIED_NAME: Final = "kvplane::attention"
_MAX_OPTIONS: Final = 1024  # that are kept
_COUNTED: Final = "_kvplane_counts_calls"
_Floats = tuple[int, tuple[float, ...]]


class OtherCallsError(InvalidRequestError):
    """The layers of a model don't call attention once each."""


class Step(Protocol):
    """Computes the attention of a model's forward pass, one layer after another, as a plan says."""

    @property
    def latent_layers(self) -> frozenset[int]:
        """The model's layers that keep latents. Only models that have latents ask for it."""

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, both [num_tokens, num_kv_heads, size], and attend from
        ``query``, [num_tokens, num_heads, head_size]; returns [num_tokens, num_heads, value's
        size]. Where latents are kept, ``key`` is the latent, ``value`` None, and the output's size
        that of a latent without its rotary part.

        A step may have an attribute ``takes_model_shapes`` that is true. Then it also takes tensors
        in transformers' shapes, [num_rows, heads, num_columns, size], where it computes all tokens
        of a batch, and returns [num_rows, num_columns, num_heads, value's size].
        """


@dataclass(slots=True)
class Running:
    """State of a forward pass. ``num_layers``: calls of attention so far. ``is_direct``: whether
    the step takes transformers' shapes and computes all tokens. ``counts_calls`` and
    ``noted_layer``: see the functions that set them.
    """

    step: Step
    tokens: torch.Tensor | slice | None
    is_direct: bool
    counts_calls: bool = False
    num_layers: int = 0
    last_layer: int = -1
    noted_layer: int | None = None


_RUNNING: ContextVar[Running] = ContextVar("kvplane_running_step")


@contextlib.contextmanager
def running(
    step: Step, model: PreTrainedModel, tokens: torch.Tensor | slice | None = None
) -> Iterator[Running]:
    """Have ``step`` compute the attention of ``model`` inside this context.

    ``tokens``: the tokens of the batch that the plan computes, in its order, as int64 indices into
    the concatenated rows or as a slice of these; None for all. The output of others is zero.
    """
    may_keep = absorbed.may_keep_latents(model)  # of other models no step need say what it keeps
    absorbed.keep_latents(model, step.latent_layers if may_keep else frozenset())
    is_direct = tokens is None and getattr(step, "takes_model_shapes", False)
    forward = Running(step, tokens, is_direct, counts_calls(model))
    token = _RUNNING.set(forward)
    try:
        yield forward
    finally:
        _RUNNING.reset(token)
        absorbed.keep_latents(model, frozenset())


def note_layer(index: int) -> None:
    """Say that the next call of attention is that of layer ``index``. Its module may serve several
    layers, as in Zamba2, and have no index of its own.
    """
    running = _RUNNING.get(None)
    if running is not None:
        running.noted_layer = index


def count_calls(model: PreTrainedModel) -> None:
    """From now on give each call of attention in a forward pass of ``model`` a pool layer of its
    own, in their order: layers may call it twice, be run again, or call none.
    """
    setattr(model, _COUNTED, True)


def counts_calls(model: PreTrainedModel) -> bool:
    """Return whether pool layers are the model's calls of attention instead of its layers."""
    return _COUNTED in model.__dict__


def register() -> None:
    """Register attention "kvplane", which needs no mask, with transformers. Repeatable."""
    AttentionInterface.register(NAME, _attention)


def check_masks() -> None:
    """From now on refuse passes in which a token sees a later one, such as another token of its
    image. Transformers then prepares masks of "kvplane" too, although none is made, so this is
    called only when a pass has inputs that a mask may depend on. May be called again.
    """
    AttentionMaskInterface.register(NAME, _refuse_later_tokens)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_later_tokens(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: torch.device,
    **_: Any,
) -> None:
    """Raise InvalidRequestError if a mask lets a token see a later one. Has the arguments of
    transformers' masks. It checks all columns so far, as a model may count columns from the first
    of all or from the first of this pass. A mask that hides nothing is an encoder's, which BART's
    decoder makes without an encoder too.
    """
    is_of_encoder = mask_function is bidirectional_mask_function
    if _RUNNING.get(None) is None or kv_length == 1 or is_of_encoder:
        return
    row = torch.arange(batch_size, device=device)[:, None]
    column = torch.arange(kv_length - 1, device=device)[None]
    if bool(torch.as_tensor(mask_function(row, 0, column, column + 1)).any()):
        raise InvalidRequestError(
            "of this model lets a token see later ones, as those of one image do, and attention "
            '"kvplane" sees earlier ones alone: give such prompts to another cache and attention',
            field="attention_mask",
        )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query [num_rows, num_heads, num_queries, head_size], the last columns,
    with key and value [num_rows, num_kv_heads, num_columns, size] after RoPE. Returns [num_rows,
    num_queries, num_heads, size of value].

    torch.compile traces this function: what depends on the step that runs is in the operator.
    """
    _check(module, query, attention_mask, arguments.get("position_bias"))
    scale = float(scaling or 0.0)
    is_latent = absorbed.keeps_latents(module)
    if is_latent:
        query = absorbed.over_latents(module, query)
    out: torch.Tensor = _OPERATOR(
        _PAGES,
        query,
        key,
        value,
        module.layer_idx,
        scale,
        arguments.get("sliding_window") or 0,
        float(arguments.get("softcap") or 0.0),
        arguments.get("s_aux"),
        _slopes(module),
        is_latent,
    )
    return absorbed.from_latents(module, out) if is_latent else out, None


def _check(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
) -> None:
    """Raise InvalidRequestError for a call whose arguments "kvplane" does not serve."""
    if mask is not None:
        raise InvalidRequestError(
            "is not served: a token sees all positions up to its own, or a window of them",
            field="attention_mask",
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise InvalidRequestError(
            "has no gradient: compute under torch.no_grad()", field="attention"
        )
    if position_bias is not None:  # no option expresses it
        raise InvalidRequestError("attention has a position bias", field="model")
    index = getattr(module, "layer_idx", None)
    if index is None and getattr(module, "is_causal", None) is False:
        raise InvalidRequestError(
            f"{type(module).__name__} keeps no keys, as in an image's encoder: call "
            'model.set_attn_implementation({"text_config": "kvplane", "vision_config": "sdpa"}), '
            "with the names of its configs",
            field="model",
        )
    if not isinstance(index, int):
        raise TypeError(f"layer_idx of {type(module).__name__} is {index!r}, not an int")


# The calls of a graph keep their order, and none is left out, as each one changes the pages. Those
# are behind the step, so a tensor without elements stands for all of them.
torch.library.define(
    _QUALIFIED_NAME,
    "(Tensor(a!) pages, Tensor query, Tensor key, Tensor value, int layer, float scale, "
    "int window, float soft_cap, Tensor? sinks, Tensor? slopes, bool is_latent) -> Tensor",
)
_OPERATOR: Final = torch.ops.kvplane.attention.default
with torch.inference_mode(mode=False):
    _PAGES: Final = torch.empty(0)


@torch.library.impl(_QUALIFIED_NAME, "CompositeExplicitAutograd")
def _compute(
    pages: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    is_latent: bool,
) -> torch.Tensor:
    """Have the running step compute a layer. Shapes are those of ``_attention``; where latents are
    kept, ``key`` is the latent, and ``value`` its part that the output is made of.
    """
    running = _RUNNING.get(None)
    if running is None:
        raise InvalidRequestError(
            'attention "kvplane" computes with a cache: give cache=PlaneCache(model), or '
            "past_key_values=PlaneCache(model) before transformers 5.24. Passes that generate makes"
            " beside it, as for guidance_scale or an assistant model, have none: they need another"
            " attention",
            field="cache",
        )
    if running.noted_layer is not None:
        layer, running.noted_layer = running.noted_layer, None
    if running.counts_calls:
        layer = running.num_layers
    if layer == running.last_layer:
        raise OtherCallsError(f"layer {layer} calls attention twice", field="model")
    options = options_of(scale, window, soft_cap, sinks, slopes)
    num_rows, num_columns, num_queries = query.shape[0], key.shape[2], query.shape[2]
    if running.is_direct and not is_latent and num_queries == num_columns:
        out = running.step.layer(layer, query, key, value, options=options)
        running.last_layer = layer
        running.num_layers += 1
        return out
    # Layers that share keys with earlier ones may leave out columns whose logits are not needed.
    if num_queries != num_columns:
        query = pad(query, (0, 0, num_columns - num_queries, 0))
    out = running.step.layer(
        layer,
        _packed(query, running.tokens),
        _packed(key, running.tokens),
        None if is_latent else _packed(value, running.tokens),
        options=options,
    )
    running.last_layer = layer
    running.num_layers += 1
    if running.tokens is not None:
        every = out.new_zeros(num_rows * num_columns, *out.shape[1:])
        every[running.tokens] = out
        out = every
    out = out.view(num_rows, num_columns, *out.shape[1:])
    return out if num_queries == num_columns else out[:, -num_queries:].contiguous()


@torch.library.register_fake(_QUALIFIED_NAME)  # type: ignore[untyped-decorator]
def _shape(
    pages: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    """Return an output of the right shape, as torch.compile asks for."""
    num_rows, num_heads, num_queries = query.shape[:3]
    return query.new_empty(num_rows, num_queries, num_heads, value.shape[3])


def _packed(tensor: torch.Tensor, tokens: torch.Tensor | slice | None) -> torch.Tensor:
    """Reshape [num_rows, num_heads, num_columns, size] to [num_tokens, num_heads, size]."""
    rows = tensor.transpose(1, 2).flatten(0, 1)
    return rows if tokens is None else rows[tokens]


def options_of(
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> AttentionOptions:
    """Return the options of an attention call; equal ones are made once. ``sinks`` and ALiBi
    ``slopes``: [num_heads].
    """
    return _options(scale, window, soft_cap, _floats(sinks), _floats(slopes))


@lru_cache(maxsize=_MAX_OPTIONS)
def _options(
    scale: float,
    window: int,
    soft_cap: float,
    sinks: tuple[float, ...],
    slopes: tuple[float, ...],
) -> AttentionOptions:
    return AttentionOptions(
        scale=scale,
        sliding_window_tokens=window,
        alibi_slopes=slopes,
        sinks=sinks,
        logit_soft_cap=soft_cap,
    )


def _slopes(module: torch.nn.Module) -> torch.Tensor | None:
    """Return the module's ALiBi slopes, float32 [num_heads], if any: transformers has no argument
    for them. ``getattr`` takes microseconds without them.
    """
    own = module.__dict__
    slopes: torch.Tensor | None = own.get("alibi_slopes")
    return own.get("_buffers", own).get("alibi_slopes") if slopes is None else slopes


_FLOATS: Final[MutableMapping[torch.Tensor, _Floats]] = WeakTensorKeyDictionary()
"""Numbers of sinks and slopes, a layer's parameters, with the count of changes they are of: to read
them at each call would cost more than all else here.
"""


def _floats(tensor: torch.Tensor | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    # Changes of inference tensors are not counted.
    version = 0 if tensor.is_inference() else tensor._version
    known = _FLOATS.get(tensor)
    if known is None or known[0] != version:
        known = _FLOATS[tensor] = version, tuple(tensor.detach().float().flatten().tolist())
    return known[1]
