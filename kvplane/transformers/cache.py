"""``model.generate(ids, cache=PlaneCache(model))``: keys and values in a kvplane pool. Before
transformers 5.24 the argument is ``past_key_values``.

A hook of the model sees the token ids of each forward pass before it begins. It admits or extends
the sequences of the batch, has the model leave out the columns whose keys and values are cached,
and starts the plan. Attention of every layer then goes to the planes, and a second hook takes the
receipt.

Transformers sees a number of columns, and no keys and values. Rows are padded on the left: a
model's column is the position ``column - num_padding`` in a row's sequence.

    columns       0       num_padding              num_columns
    row           | padding | positions 0, 1, 2 ... | the next forward pass
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvplane import ops
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.results import OperationResult, PoolInfo
from kvplane.session import Session
from kvplane.transformers import attention
from kvplane.transformers.inputs import inputs_of, wants_all_columns
from kvplane.transformers.model_state import weights_changed
from kvplane.transformers.models.positions import give_positions
from kvplane.transformers.planes import Planes, PlaneSettings, check_length, planes_of

attention.register()

_FIELD: Final = "cache"


class _Extent:
    """The number of columns that the model has seen so far."""

    num_columns = 0


class _ColumnLayer(CacheLayerMixin):
    """A cache layer as transformers sees it: a number of columns, the same for all layers."""

    is_croppable = True

    def __init__(self, extent: _Extent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._extent = extent
        self.is_initialized = True
        self.keys = self.values = torch.empty(0)  # Mllama asks how many it has

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because there is nothing to allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values as they are: see ``PlaneCache.update``."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all columns, and the first one's index, 0."""
        return self._extent.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of columns so far."""
        return self._extent.num_columns

    def get_max_length(self) -> int:
        """Return -1, which means that the layer itself has no limit."""
        return -1


class PlaneCache(Cache):
    """A cache for ``generate`` that keeps the keys and values of one batch in a pool.

    ``settings``: the fields of ``PlaneSettings``. Caches of one model with equal settings share
    planes and a session, so that a prompt finds prefixes of earlier ones. ``num_cached_tokens``:
    tokens of each row that were found cached when the batch began.

    ``close``, ``reset`` or garbage collection frees its sequences; their blocks stay cached. A
    forward pass raises InvalidRequestError for a model with another attention implementation, other
    rows than before, or padding elsewhere than on the left; PoolFullError and NeverFitsError when
    the pool is too small; StaleError, SessionNotFoundError and UnavailableError when planes went
    away. After an error the cache is empty.
    """

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        self._model = weakref.ref(model)
        self._settings = settings
        self._planes = planes_of(model, PlaneSettings(**settings))
        self._extent = _Extent()
        super().__init__(layers=[_ColumnLayer(self._extent)] * self._planes.num_layers)
        self._rows: list[_Row] = []
        self._pending: list[ops.Operation] = []  # for the next step
        self._held = _Held(self._planes)
        self._finalizer = weakref.finalize(self, self._held.free_later)
        self._finalizer.atexit = False
        self._forward: ExitStack | None = None
        self._running: attention.Running | None = None
        self._num_columns_after = 0
        self.num_cached_tokens: list[int] = []
        if _before_forward not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_before_forward, with_kwargs=True)
            model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)

    def close(self) -> None:
        """Free the sequences. The cache cannot be used afterwards; harmless when called again."""
        if self._finalizer.detach() is not None:
            self.reset()

    def weights_changed(self) -> None:
        """Report a write to weights that cannot be noticed, such as one through ``.data``: no
        earlier prefix is found again, and caches with sequences have to be reset.
        """
        model = self._model()
        if model is not None:
            weights_changed(model)

    def get_pool(self) -> PoolInfo:
        """Fetch the pool's layout, shards and usage from the control plane."""
        return self._planes.get_pool()

    def __enter__(self) -> PlaneCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlaneCache:
        """Return a copy that continues from the same tokens: its sequences are forked."""
        model = self._model()
        if model is None:
            raise InvalidRequestError("its model is gone", field=_FIELD)
        copy = PlaneCache(model, **self._settings)
        copy.num_cached_tokens = list(self.num_cached_tokens)
        if self._rows:
            ids = list(self._planes.new_ids(len(self._rows)))
            copy._held.ids.update(ids)
            fork = ops.fork([row.sequence_id for row in self._rows], ids)
            copy._held.session = self._begin([*self._pending, fork])[0]
            self._planes.finish()
            self._was_changed()
            copy._rows = [
                replace(row, sequence_id=i) for row, i in zip(self._rows, ids, strict=True)
            ]
            copy._extent.num_columns = self._extent.num_columns
        return copy

    # Called by transformers.

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values as they are: attention writes them."""
        if self._forward is None:
            raise InvalidRequestError("was made for another model", field=_FIELD)
        return key_states, value_states

    def reset(self) -> None:
        """Free the sequences, so that the cache can be used for another batch."""
        self._end_forward()
        self._rows, self._pending, self._extent.num_columns = [], [], 0
        self._held.free()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` columns, which hold rejected tokens."""
        num = -tokens_to_remove
        if num < 0 or any(row.num_tokens <= num for row in self._rows):
            raise InvalidRequestError(
                "must be negative, the number of columns to drop, and leave a token in each row",
                field="tokens_to_remove",
            )
        if num == 0 or not self._rows:
            return
        self._rows = [replace(row, num_tokens=row.num_tokens - num) for row in self._rows]
        self._extent.num_columns -= num
        ids = [row.sequence_id for row in self._rows]
        self._pending.append(ops.truncate(ids, [row.num_tokens for row in self._rows]))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` continue the former row ``beam_idx[i]``. Rows that continue the same one
        share its blocks until they are written.
        """
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        self._select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, one after another."""
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first forward pass."""
        return len(self._rows) or -1

    # A forward pass.

    def _before(self, module: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Start the plan of a forward pass. Returns the arguments to call the model with."""
        ids = self._check(module, kwargs)
        wants_all = wants_all_columns(module.config, kwargs)
        inputs = inputs_of(module, ids, kwargs)
        if inputs.has_types or inputs.names:
            attention.check_masks()
        first, stop = self._extent.num_columns, self._extent.num_columns + ids.shape[1]
        mask = kwargs.get("attention_mask")
        padding = [row.num_padding for row in self._rows]
        if mask is not None or not padding:
            found = _padding_of(mask, len(ids), stop)
            if padding and found != padding:
                raise InvalidRequestError("has other padding than before", field="attention_mask")
            padding = found
        positions = _positions_of(kwargs.get("position_ids"), padding, first, stop, ids.device)
        block_size = self._planes.block_size_tokens
        try:
            check_length(module, stop - min(padding))
            if self._rows:
                lengths = [row.num_tokens for row in self._rows]
                self._append(inputs.keys([0] * len(ids), lengths, block_size))
                computed = [first] * len(ids)
            else:
                keys = inputs.keys(padding, [0] * len(ids), block_size)
                # Columns whose logits are wanted have to be computed.
                last = 0 if wants_all else kwargs.get("logits_to_keep")
                computed = self._admit(keys, padding, last if isinstance(last, int) else 0)
        except KvplaneError:
            self.reset()
            raise
        start = first + inputs.leave_out(kwargs, min(computed) - first)
        tokens = _computed_tokens(computed, start, stop, ids.device)
        self._forward = ExitStack()
        running = attention.running(self._planes.backend, module, tokens)
        self._running = self._forward.enter_context(running)
        self._extent.num_columns, self._num_columns_after = start, stop
        kwargs["position_ids"] = positions[:, start - first :]
        give_positions(module, kwargs["position_ids"])
        return kwargs

    def _after(self, *, failed: bool) -> None:
        if self._forward is None:  # it did not begin
            return
        if failed:
            self.reset()
            return
        num_layers = 0 if self._running is None else self._running.num_layers
        if num_layers != self._planes.num_layers:
            self.reset()
            raise InvalidRequestError(
                f'computes attention by "kvplane" in {num_layers} of its {self._planes.num_layers} '
                "layers: the others keep their own code",
                field="model",
            )
        self._end_forward(failed=False)
        self._extent.num_columns = self._num_columns_after

    def _check(self, module: PreTrainedModel, kwargs: dict[str, Any]) -> torch.Tensor:
        """Check a forward pass's arguments, and return its token ids, [num_rows, num_columns]."""
        if self._forward is not None:
            raise InvalidRequestError(
                "a forward pass was interrupted: call reset first", field=_FIELD
            )
        if not self._finalizer.alive:
            raise InvalidRequestError("was closed", field=_FIELD)
        if self._model() is not module:
            raise InvalidRequestError("was made for another model", field=_FIELD)
        name = module.config.get_text_config()._attn_implementation
        if name != attention.NAME:
            raise InvalidRequestError(
                f'computes attention by {name!r}: call model.set_attn_implementation("kvplane")',
                field="model",
            )
        if kwargs.get("use_cache") is False:
            raise InvalidRequestError("must be true with a cache", field="use_cache")
        ids: torch.Tensor | None = kwargs.get("input_ids")
        if ids is None or ids.dim() != 2:
            raise InvalidRequestError(
                "must be given, [num_rows, num_columns]: prefixes are found by token ids",
                field="input_ids",
            )
        if self._rows and len(ids) != len(self._rows):
            raise InvalidRequestError(
                f"has {len(ids)} rows, but the cache has {len(self._rows)}: reset it, or make a "
                "new one for another batch",
                field="input_ids",
            )
        self._planes.follow(module)
        return ids

    def _admit(self, rows: list[list[int]], padding: Sequence[int], last: int) -> list[int]:
        """Admit the sequences of new rows. Returns the first column that each row has to compute.
        ``last``: number of last columns whose logits are wanted; 0 for all.
        """
        sequence_ids = self._planes.new_ids(len(rows))
        self._held.ids.update(sequence_ids)
        if len(rows) == 1 and 1 < last <= len(rows[0]):
            cached = [self._admit_behind(sequence_ids[0], rows[0], len(rows[0]) - last + 1)]
        else:
            operations = [
                ops.admit(sequence_id, tokens, skip_prefix_lookup=last != 1)
                for sequence_id, tokens in zip(sequence_ids, rows, strict=True)
            ]
            results = self._begin(operations)[1]
            cached = [result.admit.num_cached_tokens for result in results]
        self.num_cached_tokens = cached
        self._rows = [
            _Row(sequence_id, skip, len(tokens))
            for sequence_id, skip, tokens in zip(sequence_ids, padding, rows, strict=True)
        ]
        return [skip + num for skip, num in zip(padding, cached, strict=True)]

    def _admit_behind(self, sequence_id: int, tokens: list[int], num_found: int) -> int:
        """Admit a sequence with fewer than ``num_found`` cached tokens. Returns how many
        it uses.
        """
        admit = ops.admit(sequence_id, tokens[:num_found], num_compute_tokens=0)
        (result,) = self._begin([admit])[1]
        self._planes.finish()
        cached: int = result.admit.num_cached_tokens
        num_slots = len(tokens) - cached
        new = tokens[num_found:]
        self._begin([ops.append(sequence_id, new, num_slots, first_positions=cached)])
        return cached

    def _append(self, ids: list[list[int]]) -> None:
        sequence_ids = [row.sequence_id for row in self._rows]
        num_each = [len(tokens) for tokens in ids]
        append = ops.append(
            sequence_ids,
            [token for tokens in ids for token in tokens],
            num_each,
            first_positions=[row.num_tokens for row in self._rows],
            num_tokens=num_each,
        )
        self._begin([*self._pending, append])
        self._was_changed()
        self._rows = [
            replace(row, num_tokens=row.num_tokens + len(tokens))
            for row, tokens in zip(self._rows, ids, strict=True)
        ]

    def _begin(self, operations: list[ops.Operation]) -> tuple[Session, list[OperationResult]]:
        self._held.session, results = self._planes.begin(operations, self._held.session)
        return self._held.session, results

    def _was_changed(self) -> None:
        """Clear the pending operations, because they were done."""
        self._pending = []
        self._held.ids = {row.sequence_id for row in self._rows}

    def _end_forward(self, *, failed: bool = True) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.close()
            if failed:
                self._planes.abandon()
            else:
                self._planes.finish()

    def _select(self, indices: list[int]) -> None:
        """Let row ``i`` continue the former row ``indices[i]``. The first use of a row takes its
        sequence, later ones take forks of it.
        """
        if not self._rows:
            return
        rows, parents, children = [], [], []
        taken: set[int] = set()
        for index in indices:
            row = self._rows[index]
            if index in taken:
                (child,) = self._planes.new_ids(1)
                parents.append(row.sequence_id)
                children.append(child)
                row = replace(row, sequence_id=child)
            taken.add(index)
            rows.append(row)
        unused = [row.sequence_id for i, row in enumerate(self._rows) if i not in taken]
        if parents:
            self._pending.append(ops.fork(parents, children))
        if unused:
            self._pending.append(ops.free(unused))
        self._held.ids.update(children)
        self._rows = rows


class _Held:
    """The sequences that a cache may hold, in an object of their own for its finalizer."""

    def __init__(self, planes: Planes) -> None:
        self.ids: set[int] = set()
        self.session: Session | None = None
        self._planes = planes

    def free(self) -> None:
        session, ids = self._take()
        if session is not None and ids:
            self._planes.free(session, ids)

    def free_later(self) -> None:
        session, ids = self._take()
        if session is not None and ids:
            self._planes.free_later(session, ids)

    def _take(self) -> tuple[Session | None, list[int]]:
        session, self.session = self.session, None
        ids, self.ids = sorted(self.ids), set()
        return session, ids


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    cache = _cache_in(kwargs)
    if cache is None and module.config.get_text_config()._attn_implementation == attention.NAME:
        # Phi-3 drops the cache of rows whose length changes its frequencies.
        ids = kwargs.get("input_ids")
        check_length(module, 0 if ids is None else ids.shape[-1])
    return None if cache is None else ((), cache._before(module, kwargs))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_forward(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """End the forward pass of the cache. Called after an error too, with no output."""
    cache = _cache_in(kwargs)
    if cache is not None:
        cache._after(failed=output is None)


def _cache_in(kwargs: dict[str, Any]) -> PlaneCache | None:
    """Find the cache among a forward pass's arguments, whatever this release of transformers, or a
    model with code of its own, calls the argument.
    """
    return next((value for value in kwargs.values() if isinstance(value, PlaneCache)), None)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the batch: its sequence, and that one's tokens once all columns are computed."""

    sequence_id: int
    num_padding: int
    num_tokens: int


def _padding_of(mask: torch.Tensor | None, num_rows: int, num_columns: int) -> list[int]:
    """Return the number of padding columns at the left of each row. Raises InvalidRequestError for
    a mask other than [num_rows, num_columns] with zeros, then at least one 1, in each row.
    """
    if mask is None:
        return [0] * num_rows
    if mask.shape != (num_rows, num_columns):
        raise InvalidRequestError(
            f"must be [{num_rows}, {num_columns}], all columns so far and the new ones, is "
            f"{list(mask.shape)}",
            field="attention_mask",
        )
    seen = mask.bool()
    padding = num_columns - seen.sum(dim=1)
    if not torch.equal(seen, torch.arange(num_columns, device=mask.device) >= padding[:, None]):
        raise InvalidRequestError("must have padding on the left alone", field="attention_mask")
    if bool((padding == num_columns).any()):
        raise InvalidRequestError("has a row of padding alone", field="attention_mask")
    return [int(num) for num in padding.tolist()]


def _positions_of(
    given: torch.Tensor | None, padding: Sequence[int], first: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Return the positions of columns [first, stop) in their sequences, int64 [num_rows, stop -
    first]; 0 in padding. Raises InvalidRequestError when others were ``given``: the cache would be
    wrong.
    """
    columns = torch.arange(first, stop, device=device)
    positions = columns - torch.tensor(padding, device=device)[:, None]
    if given is not None:
        is_right = given.dim() == 2 and given.shape[1] == stop - first
        if not is_right or not bool(((given == positions) | (positions < 0)).all()):
            raise InvalidRequestError(
                "must count the tokens of each row from 0, padding left out", field="position_ids"
            )
    return positions.clamp_(min=0)


def _computed_tokens(
    first_columns: Sequence[int], start: int, stop: int, device: torch.device
) -> torch.Tensor | None:
    """Return the columns in [start, stop) of each row from its first column on, as indices into the
    concatenated rows; None if these are all.
    """
    if all(first == start for first in first_columns):
        return None
    width = stop - start
    return torch.cat(
        [
            torch.arange(row * width + first - start, (row + 1) * width, device=device)
            for row, first in enumerate(first_columns)
        ]
    )
