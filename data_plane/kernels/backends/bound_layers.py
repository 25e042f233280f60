"""Writes and attends without checks, for a caller that calls once for each layer of each plan.

Arguments that stay the same from plan to plan are checked and bound once for each layer: its pages
and scales, the options, and the types, heads and strides of the caller's tensors, for any number of
tokens. Arguments that a plan's layers share are bound once for each plan. Native objects hold only
addresses, so the Python objects beside them keep the memory.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments, bytes_of_token
from data_plane.kernels.step_rows import StepRows
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

_BATCH: Final = ("bound",)  # among a batch's shared plans

Signature = tuple[Any, ...]
LayerTensors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Query, key and value of a layer. Without a query it only writes; without a key, attends."""


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer whose arguments were checked for tensors of one signature, so that a call needs no
    more checks. ``token_bytes``: from ``bytes_of_token``. ``held``: tensors whose addresses
    ``native`` uses. The caller keeps a call's tensors alive until it returns.
    """

    native: Any
    signature: Signature
    num_tokens: int
    output_shape: tuple[int, ...]
    window_tokens: int
    token_bytes: int
    held: tuple[torch.Tensor | None, ...]

    def fits(self, batch: StepRows) -> bool:
        """Return whether the layer may run for this batch: it has as many tokens, and the layer's
        window reaches no trimmed entry of its tables.
        """
        most = batch.max_window_tokens
        return self.num_tokens == batch.num_tokens and (
            most is None or 0 < self.window_tokens <= most
        )


class BoundLayers(ABC):
    """Binds the layers of one shard. A layer is given by its index."""

    def __init__(self, bind: Callable[[WriteArguments, AttentionArguments], Any]) -> None:
        """``bind`` makes what calls need of arguments that have been checked."""
        self._bind = bind
        # The latest binding for one token, whose token stride does not matter, and for several.
        self._layers: dict[tuple[int, bool], BoundLayer] = {}
        self._last: dict[int, BoundLayer] = {}  # the latest call's

    def find(
        self,
        batch: StepRows,
        layer: int,
        tensors: LayerTensors,
        options: AttentionOptions,
        out: torch.Tensor | None,
    ) -> BoundLayer | None:
        """Return the layer that ``bind`` bound, if these arguments need no more checks; else None.
        Both a query and a key must be given. Tensors of four dimensions, [num_rows, heads,
        num_columns, size], stand for [num_rows * num_columns, heads, size] where that is a view of
        them.
        """
        bound = self._of_tensors(layer, tensors, options)
        if bound is None or not bound.fits(batch):
            return None
        return bound if out is None or out.shape == bound.output_shape else None

    def _of_tensors(
        self, layer: int, tensors: LayerTensors, options: AttentionOptions
    ) -> BoundLayer | None:
        """Return the layer as it was bound for tensors and options of this signature; None if it
        was not.
        """
        query = tensors[0]
        assert query is not None
        signature, last = _signature(tensors, options), self._last.get(layer)
        if last is not None and last.signature == signature:
            return last
        leading: tuple[int, ...] = (query.shape[0],)
        of_tokens = signature
        if query.dim() == 4:
            of_rows = _of_rows(tensors)
            if of_rows is None:
                return None
            leading = query.shape[0], query.shape[2]
            of_tokens = _signature(of_rows, options)
        num_tokens = math.prod(leading)
        bound = self._layers.get((layer, num_tokens == 1))
        if bound is None or _of_any_number(bound.signature) != _of_any_number(of_tokens):
            return None
        shape = *leading, *bound.output_shape[-2:]
        last = replace(bound, signature=signature, num_tokens=num_tokens, output_shape=shape)
        self._last[layer] = last
        return last

    def bind(
        self,
        layer: int,
        options: AttentionOptions,
        write: WriteArguments,
        attention: AttentionArguments,
    ) -> BoundLayer:
        """Bind a layer for later calls whose tensors have the same signature as these arguments.
        ``options``: the caller's.
        """
        bound = BoundLayer(
            self._bind(write, attention),
            _signature((attention.query, write.key, write.value), options),
            attention.output_shape[0],
            attention.output_shape,
            attention.options.sliding_window_tokens,
            bytes_of_token(write.keys, write.values),
            (
                *(write.keys, write.values, attention.key_scales, attention.value_scales),
                *(attention.slopes, attention.sinks, attention.seen_blocks),
            ),
        )
        self._layers[layer, bound.num_tokens == 1] = self._last[layer] = bound
        return bound

    def batch(self, batch: StepRows) -> Any:
        """Return the native object that all layers of ``batch`` share. The batch keeps it."""
        made = batch.plans.made
        if _BATCH not in made:
            made[_BATCH] = self._bind_batch(batch)
        return made[_BATCH]

    @abstractmethod
    def _bind_batch(self, batch: StepRows) -> Any:
        """Make what all layers of ``batch`` share."""


class HostLayers(BoundLayers):
    """Binds and runs the layers of one shard on the CPU, which native code can do by itself."""

    def __init__(
        self,
        module: ModuleType,
        bind: Callable[[WriteArguments, AttentionArguments], Any],
        num_threads: Callable[[], int],
    ) -> None:
        """``bind`` makes the module's BoundLayer. ``num_threads`` returns a call's threads."""
        super().__init__(bind)
        self._module = module
        self._num_threads = num_threads

    def run(
        self,
        bound: BoundLayer,
        batch: StepRows,
        tensors: LayerTensors,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, float, float]:
        """Write and attend with a bound layer that fits the batch. Returns the output, which is
        ``out`` if given, and the seconds that each of the two took.

        Raises InvalidRequestError for a bad id or length.
        """
        query, key, value = tensors
        assert query is not None and key is not None
        output = out
        if output is None:
            output = torch.empty(bound.output_shape, dtype=query.dtype, device="cpu")
        began_s = time.perf_counter()
        try:
            write_s = bound.native.write_and_attend(
                self.batch(batch),
                query.data_ptr(),
                key.data_ptr(),
                0 if value is None else value.data_ptr(),
                output.data_ptr(),
                self._num_threads(),
            )
        except IndexError as error:
            field, _, wanted = str(error).partition(" must ")
            raise InvalidRequestError(f"must {wanted}", field=field) from None
        return output, write_s, time.perf_counter() - began_s - write_s

    @property
    def num_threads(self) -> int:
        """Number of threads of a call."""
        return self._num_threads()

    def _bind_batch(self, batch: StepRows) -> Any:
        return self._module.BoundBatch(
            slots=batch.slots.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            wide_block_tables=batch.block_tables.dtype == torch.int64,
            max_blocks=batch.block_tables.shape[1],
            query_starts=batch.query_starts.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            num_sequences=batch.context_lens.shape[0],
            num_tokens=batch.num_tokens,
            max_window_tokens=-1 if batch.max_window_tokens is None else batch.max_window_tokens,
        )


def _signature(tensors: LayerTensors, options: AttentionOptions) -> Signature:
    """Return everything that the checks of arguments depend on, except the batch: tensors of equal
    signatures are both accepted, or both refused.
    """
    query, key, value = tensors
    assert query is not None and key is not None
    return (
        options,
        (query.shape, query.stride(), query.dtype, query.device, query.layout),
        (key.shape, key.stride(), key.dtype, key.device, key.layout),
        None
        if value is None
        else (value.shape, value.stride(), value.dtype, value.device, value.layout),
    )


def _of_rows(tensors: LayerTensors) -> LayerTensors | None:
    """Convert [num_rows, heads, num_columns, size] to views [num_rows * num_columns, heads, size];
    returns None where these would be copies.
    """
    if any(t is not None and t.dim() != 4 for t in tensors):
        return None
    query, key, value = (None if t is None else of_tokens(t) for t in tensors)
    rows = query, key, value
    pairs = zip(tensors, rows, strict=True)
    are_views = all(a is None or b is None or a.data_ptr() == b.data_ptr() for a, b in pairs)
    return rows if are_views else None


def of_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Convert [num_rows, heads, num_columns, size] to [num_rows * num_columns, heads, size]; a
    tensor of three dimensions stays as it is.
    """
    return tensor if tensor.dim() != 4 else tensor.transpose(1, 2).flatten(0, 1)


def _of_any_number(signature: Signature) -> Signature:
    """Replace each tensor's number of tokens in a signature by whether it equals the query's."""
    options, *tensors = signature
    num_tokens = tensors[0][0][:1]
    of_one = [t and (t[0][:1] == num_tokens, t[0][1:], *t[1:]) for t in tensors]
    return (options, *of_one)
