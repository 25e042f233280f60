"""Writes and attends in one native call, for a caller that calls once for each layer of each plan.

Arguments that stay the same from plan to plan are checked and bound once for each layer: its pages
and scales, the options, and the types, heads and strides of the caller's tensors, for any number of
tokens. Arguments that a plan's layers share are bound once for each plan. Native objects hold only
addresses, so the Python objects beside them keep the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments, bytes_of_token
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError

Signature = tuple[Any, ...]


class Batch(Protocol):
    """The properties of ``AttentionBatch`` that are used here."""

    @property
    def group(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_spans(self) -> int: ...
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def block_tables(self) -> torch.Tensor: ...
    @property
    def query_starts(self) -> torch.Tensor: ...
    @property
    def context_lens(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer bound for tensors of one signature. ``output_heads``: heads of the output, and their
    size. ``token_bytes``: from ``bytes_of_token``. ``held``: tensors whose addresses ``native``
    uses. The caller keeps a call's tensors alive until it returns.
    """

    native: Any
    signature: Signature
    output_heads: tuple[int, int]
    window_tokens: int
    token_bytes: int
    held: tuple[torch.Tensor | None, ...]


class BoundLayers:
    """The layers of one shard on the CPU. A layer is given by its index."""

    def __init__(
        self,
        module: ModuleType,
        bind: Callable[[WriteArguments, AttentionArguments], Any],
        num_threads: Callable[[], int],
    ) -> None:
        """``bind`` makes the module's BoundLayer. ``num_threads`` returns the threads of a call."""
        self._module = module
        self._bind = bind
        self._num_threads = num_threads
        # The latest binding for one token, whose token stride does not matter, and for several.
        self._layers: dict[tuple[int, bool], BoundLayer] = {}
        self._last: dict[int, BoundLayer] = {}  # the latest call's
        self._batches: dict[int, tuple[Batch, Any]] = {}  # the latest of each layer group

    def find(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        options: AttentionOptions,
    ) -> BoundLayer | None:
        """Return the bound layer; None if it is not bound, or if these arguments differ from the
        ones that were checked then.
        """
        signature, last = _signature(query, key, value, options), self._last.get(layer)
        if last is not None and last.signature == signature:
            return last
        bound = self._layers.get((layer, query.shape[0] == 1))
        if bound is None or _of_any_number(bound.signature) != _of_any_number(signature):
            return None
        last = self._last[layer] = replace(bound, signature=signature)
        return last

    def bind(
        self,
        layer: int,
        options: AttentionOptions,
        write: WriteArguments,
        attention: AttentionArguments,
    ) -> None:
        """Bind a layer for calls like the one with these arguments. ``options``: the caller's."""
        num_tokens, *output_heads = attention.output_shape
        bound = BoundLayer(
            self._bind(write, attention),
            _signature(attention.query, write.key, write.value, options),
            (output_heads[0], output_heads[1]),
            attention.options.sliding_window_tokens,
            bytes_of_token(write.keys, write.values),
            (
                *(write.keys, write.values, attention.key_scales, attention.value_scales),
                *(attention.slopes, attention.sinks),
            ),
        )
        self._layers[layer, num_tokens == 1] = self._last[layer] = bound

    def run(
        self,
        bound: BoundLayer,
        batch: Batch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
    ) -> tuple[torch.Tensor, float, float]:
        """Write and attend. Returns the output, and the seconds that each of them took.

        ``batch`` has as many tokens as the query. Raises InvalidRequestError for a bad id or
        length.
        """
        native = self.batch(batch)
        shape = batch.num_tokens, *bound.output_heads
        output = torch.empty(shape, dtype=query.dtype, device="cpu")
        tensors = (query, key, value, output)
        began_s = time.perf_counter()
        try:
            write_s = bound.native.write_and_attend(
                native, *(0 if t is None else t.data_ptr() for t in tensors), self.num_threads
            )
        except IndexError as error:
            field, _, wanted = str(error).partition(" must ")
            raise InvalidRequestError(f"must {wanted}", field=field) from None
        return output, write_s, time.perf_counter() - began_s - write_s

    def batch(self, batch: Batch) -> Any:
        """Return the native object that the layers of ``batch`` share; the latest is kept."""
        known, native = self._batches.get(batch.group, (None, None))
        if known is not batch:
            native = self._bind_batch(batch)
            self._batches[batch.group] = batch, native
        return native

    @property
    def num_threads(self) -> int:
        """Threads of a call."""
        return self._num_threads()

    def _bind_batch(self, batch: Batch) -> Any:
        return self._module.BoundBatch(
            slots=batch.slots.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            wide_block_tables=batch.block_tables.dtype == torch.int64,
            max_blocks=batch.block_tables.shape[1],
            query_starts=batch.query_starts.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            num_sequences=batch.num_spans,
            num_tokens=batch.num_tokens,
        )


def _signature(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, options: AttentionOptions
) -> Signature:
    """Return everything that the checks of arguments depend on, except the batch: tensors of equal
    signatures are both accepted, or both refused.
    """
    return (
        options,
        (query.shape, query.stride(), query.dtype, query.device, query.layout),
        (key.shape, key.stride(), key.dtype, key.device, key.layout),
        None
        if value is None
        else (value.shape, value.stride(), value.dtype, value.device, value.layout),
    )


def _of_any_number(signature: Signature) -> Signature:
    """Replace each tensor's number of tokens by whether it equals the query's."""
    options, *tensors = signature
    num_tokens = tensors[0][0][:1]
    of_one = [t and (t[0][:1] == num_tokens, t[0][1:], *t[1:]) for t in tensors]
    return (options, *of_one)
