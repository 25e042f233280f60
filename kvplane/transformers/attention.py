"""Attention of a transformers model, computed by a data plane.

Transformers calls attention by name through its AttentionInterface. The name "kvplane" passes q, k
and v of each layer to the step that runs now, which a context variable holds, and returns that
step's output. The mask of that name is None on purpose: a plan's spans say which positions a token
sees, so there is nothing left to mask. The model's arguments for a layer's attention are passed on
as AttentionOptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.transformers import absorbed

NAME: Final = "kvplane"
_KEPT: Final = "_kvplane_options"


class Step(Protocol):
    """Computes the attention of a model's forward pass, one layer after another, as a plan says."""

    @property
    def latent_layers(self) -> frozenset[int]:
        """The model's layers that keep latents."""
        ...

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
        ...


@dataclass(slots=True)
class Running:
    """State of a forward pass. ``num_layers``: calls of attention so far. ``is_direct``: whether
    the step takes transformers' shapes and computes all tokens.
    """

    step: Step
    tokens: torch.Tensor | None
    is_direct: bool
    num_layers: int = 0
    last_layer: int = -1


_RUNNING: ContextVar[Running] = ContextVar("kvplane_running_step")


@contextlib.contextmanager
def running(step: Step, tokens: torch.Tensor | None = None) -> Iterator[Running]:
    """Have ``step`` compute the model's attention inside this context.

    ``tokens``: the tokens of the batch that the plan computes, int64, as indices into the
    concatenated rows, in the plan's order; None for all. The output of others is zero.
    """
    is_direct = tokens is None and getattr(step, "takes_model_shapes", False)
    forward = Running(step, tokens, is_direct)
    token = _RUNNING.set(forward)
    try:
        yield forward
    finally:
        _RUNNING.reset(token)


def keeps_latents(module: Any) -> bool:
    """Return whether the running step, if there is one, keeps the latents of ``module``."""
    forward = _RUNNING.get(None)
    if forward is None or not absorbed.has_latents(module):
        return False
    return module.layer_idx in forward.step.latent_layers


def register() -> None:
    """Register attention "kvplane", which needs no mask, with transformers. Repeatable."""
    AttentionInterface.register(NAME, _attention)


def check_masks() -> None:
    """From now on refuse passes in which a token sees a later one, such as another token of its
    image. Transformers then prepares masks of "kvplane" too, although none is made, so this is
    called only when a pass has inputs that a mask may depend on. May be called again.
    """
    AttentionMaskInterface.register(NAME, _refuse_later_tokens)


def _refuse_later_tokens(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: torch.device,
    **_: Any,
) -> None:
    """Raise InvalidRequestError if a mask lets a token see a later one. Has the arguments of
    transformers' masks. It checks all columns so far, as a model may count columns from the first
    of all or from the first of this pass.
    """
    if _RUNNING.get(None) is None or kv_length == 1:
        return
    row = torch.arange(batch_size, device=device)[:, None]
    column = torch.arange(kv_length - 1, device=device)[None]
    if bool(torch.as_tensor(mask_function(row, 0, column, column + 1)).any()):
        raise InvalidRequestError(
            "of this model lets a token see later ones, as those of one image do, and attention "
            '"kvplane" sees earlier ones alone: give such prompts to another cache and attention',
            field="attention_mask",
        )


def _running_for(module: torch.nn.Module) -> Running:
    """Return the forward pass that a layer belongs to."""
    if getattr(module, "is_causal", None) is False and not hasattr(module, "layer_idx"):
        raise InvalidRequestError(
            f"{type(module).__name__} keeps no keys, as in an image's encoder: call "
            'model.set_attn_implementation({"text_config": "kvplane", "vision_config": "sdpa"}), '
            "with the names of its configs",
            field="model",
        )
    running = _RUNNING.get(None)
    if running is None:
        raise InvalidRequestError(
            'attention "kvplane" computes with a cache: give cache=PlaneCache(model), or '
            "past_key_values=PlaneCache(model) before transformers 5.24. Passes that generate makes"
            " beside it, as for guidance_scale or an assistant model, have none: they need another"
            " attention",
            field="cache",
        )
    return running


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    """
    if attention_mask is not None:
        raise InvalidRequestError(
            "is not served: a token sees all positions up to its own, or a window of them",
            field="attention_mask",
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise InvalidRequestError(
            "has no gradient: compute under torch.no_grad()", field="attention"
        )
    running = _running_for(module)
    index = module.layer_idx
    if not isinstance(index, int):
        raise TypeError(f"layer_idx of {type(module).__name__} is {index!r}, not an int")
    if index == running.last_layer:
        raise InvalidRequestError(f"layer {index} calls attention twice", field="model")
    options = options_of(module, scaling, arguments)
    is_latent = keeps_latents(module)
    if running.is_direct and not is_latent and query.shape[2] == key.shape[2]:
        out = running.step.layer(index, query, key, value, options=options)
        running.last_layer = index
        running.num_layers += 1
        return out, None
    if is_latent:
        query = absorbed.over_latents(module, query)
    num_rows, num_columns, num_queries = query.shape[0], key.shape[2], query.shape[2]
    # Layers that share keys with earlier ones may leave out columns whose logits are not needed.
    if num_queries != num_columns:
        query = pad(query, (0, 0, num_columns - num_queries, 0))
    out = running.step.layer(
        index,
        _packed(query, running.tokens),
        _packed(key, running.tokens),
        None if is_latent else _packed(value, running.tokens),
        options=options,
    )
    if is_latent:
        out = absorbed.from_latents(module, out)
    running.last_layer = index
    running.num_layers += 1
    if running.tokens is not None:
        every = out.new_zeros(num_rows * num_columns, *out.shape[1:])
        out = every.index_copy_(0, running.tokens, out)
    out = out.view(num_rows, num_columns, *out.shape[1:])
    return out if num_queries == num_columns else out[:, -num_queries:], None


def _packed(tensor: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Reshape [num_rows, num_heads, num_columns, size] to [num_tokens, num_heads, size]."""
    rows = tensor.transpose(1, 2).flatten(0, 1)
    return rows if tokens is None else rows[tokens]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Options of a module, and the arguments they were made from. Sinks and slopes, a layer's
    parameters, are compared by identity and count of changes: comparing values costs more than
    making options.
    """

    numbers: tuple[float, ...]
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    options: AttentionOptions


def options_of(
    module: torch.nn.Module, scaling: float | None, arguments: Mapping[str, Any]
) -> AttentionOptions:
    """Return the options of an attention call of ``module``; it caches them for later calls.

    ``scaling`` and ``arguments``, the other keyword arguments, have transformers' names.
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
    """Return the module's ALiBi slopes, if any. ``getattr`` takes microseconds without them."""
    own = module.__dict__
    slopes: torch.Tensor | None = own.get("alibi_slopes")
    return own.get("_buffers", own).get("alibi_slopes") if slopes is None else slopes


def _num_changes(tensor: torch.Tensor | None) -> int:
    """Return how often a tensor was changed in place; not counted for inference tensors."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _floats(tensor: torch.Tensor | None) -> tuple[float, ...]:
    return () if tensor is None else tuple(tensor.detach().float().flatten().tolist())
