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

Where the model has running states (``states``), these lie in cache layers of transformers' own, and
the pool has checkpoints of them. A pass over a prompt is then made in two: the hook runs the model
up to the end of the last block, and stores a checkpoint; the columns after it are left to the pass
that was asked for. No checkpoint is taken where blocks of the rows end at different columns, since
their padding differs by other than whole blocks. A row continues from a checkpoint only if all rows
do so from one column: no row then has padding after it. Otherwise the hits are cut to the first
row's column and looked up again, and without a common one all rows are computed from the beginning.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from kvplane import ops
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.results import OperationResult, PoolInfo
from kvplane.session import Session
from kvplane.transformers import attention
from kvplane.transformers.columns import ColumnLayer, Extent
from kvplane.transformers.inputs import Inputs, first_columns, inputs_of, wants_all_columns
from kvplane.transformers.model_state import weights_changed
from kvplane.transformers.models.positions import give_positions
from kvplane.transformers.planes import Planes, PlaneSettings, check_length, planes_of
from kvplane.transformers.states import cache_layers

attention.register()

_FIELD: Final = "cache"
_NO_CROP: Final = (
    "holds running states, from which no token can be taken back: generate without an assistant "
    "model and without prompt_lookup_num_tokens"
)


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
        self._extent = Extent()
        self._states = self._planes.states
        super().__init__(layers=self._new_layers(model))
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

    def _new_layers(self, model: PreTrainedModel) -> list[Any]:
        if self._states is None:
            return [ColumnLayer(self._extent)] * self._planes.num_layers
        return cache_layers(model.config, self._extent)

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

    def __exit__(self, *exception: object) -> None:
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
            if self._states is not None:
                pages = self._states.read(self.layers)
                self._states.write(copy.layers, pages, model.device)
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
        if self._states is not None:
            attention.note_layer(layer_idx)
        return key_states, value_states

    def reset(self) -> None:
        """Free the sequences, so that the cache can be used for another batch."""
        self._end_forward()
        self._rows, self._pending, self._extent.num_columns = [], [], 0
        self._held.free()
        model = self._model()
        if self._states is not None and model is not None:
            self.layers = self._new_layers(model)

    def activate_past_recording(self) -> None:
        """Refuse to record states, as transformers does in order to crop them."""
        if self._states is not None:
            raise InvalidRequestError(_NO_CROP, field=_FIELD)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` columns, which hold rejected tokens."""
        num = -tokens_to_remove
        if num and self._states is not None:
            raise InvalidRequestError(_NO_CROP, field=_FIELD)
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
            if self._states is not None:
                last = 0 if wants_all or inputs.names else kwargs.get("logits_to_keep")
                columns = _Columns(first, stop, last if isinstance(last, int) else 0, padding)
                computed = self._begin_rows(module, kwargs, inputs, columns, positions)
            elif self._rows:
                lengths = [row.num_tokens for row in self._rows]
                self._append(inputs.keys([0] * len(ids), lengths, block_size))
                computed = [first] * len(ids)
            else:
                keys = inputs.keys(padding, [0] * len(ids), block_size)
                # Columns whose logits are wanted have to be computed.
                last = 0 if wants_all else kwargs.get("logits_to_keep")
                computed = self._admit(keys, padding, last if isinstance(last, int) else 0)
        except BaseException:
            self.reset()
            raise
        start = first + inputs.leave_out(kwargs, min(computed) - first)
        self._enter(module, computed, start, stop)
        kwargs["position_ids"] = positions[:, start - first :]
        give_positions(module, kwargs["position_ids"])
        return kwargs

    def _enter(
        self, module: PreTrainedModel, computed: Sequence[int], start: int, stop: int
    ) -> None:
        """Have the plan compute columns [start, stop), of each row those from ``computed`` on."""
        tokens = _computed_tokens(computed, start, stop, module.device)
        self._forward = ExitStack()
        running = attention.running(self._planes.backend, module, tokens)
        self._running = self._forward.enter_context(running)
        self._extent.num_columns, self._num_columns_after = start, stop

    def _after(self, output: Any) -> None:
        if self._forward is None:  # it did not begin
            return
        if output is None:
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
        if not _is_finite(output):  # its keys and values would become a cached prefix
            self.reset()
            raise InternalError("the model's logits are not finite: they have NaN or infinity")
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

    def _begin_rows(
        self,
        module: PreTrainedModel,
        kwargs: dict[str, Any],
        inputs: Inputs,
        columns: _Columns,
        positions: torch.Tensor,
    ) -> list[int]:
        """Start the plan of a pass of a model with running states, after a pass up to the columns'
        checkpoint, if they have one. Returns the first column of each row that is left to compute.
        """
        block_size, cached = self._planes.block_size_tokens, [0]
        if self._rows:
            lengths = [row.num_tokens for row in self._rows]
            tokens = inputs.keys([0] * len(lengths), lengths, block_size)
            computed = [columns.first] * len(lengths)
        else:
            tokens = inputs.keys(columns.padding, [0] * len(columns.padding), block_size)
            tokens = self._admit_at_one_column(tokens, columns)
            cached = self.num_cached_tokens
            computed = [skip + n for skip, n in zip(columns.padding, cached, strict=True)]
        start, checkpoint = min(computed), columns.checkpoint(min(computed), block_size)
        if checkpoint:
            before = dict(kwargs)
            inputs.leave_out(before, start - columns.first)
            before = first_columns(before, checkpoint - start)
            before["position_ids"] = positions[
                :, start - columns.first : checkpoint - columns.first
            ]
            if before.get("attention_mask") is not None:
                before["attention_mask"] = before["attention_mask"][:, :checkpoint]
            ends = [checkpoint - skip for skip in columns.padding]
            kept = self._append(tokens, ends, keep=True)
            self._restore(cached)
            self._enter(module, computed, start, checkpoint)
            give_positions(module, before["position_ids"])
            with torch.no_grad():
                # Without hooks: they are for the pass that was asked for.
                output = module.forward(**before)
            self._store(kept)
            self._after(output)
            tokens, computed, cached = [[] for _ in ends], [checkpoint] * len(ends), [0]
        self._append(tokens, [columns.stop - skip for skip in columns.padding])
        self._restore(cached)
        return computed

    def _admit_at_one_column(self, rows: list[list[int]], columns: _Columns) -> list[list[int]]:
        """Admit new rows, which all continue from checkpoints at one column, or all begin anew.
        Returns the tokens of each row that are still to be appended.
        """
        padding, bound = columns.padding, columns.stop - columns.last + 1
        while True:
            is_new = columns.last == 0 or bound <= max(padding) + 1
            ids = self._planes.new_ids(len(rows))
            self._held.ids.update(ids)
            known = [len(t) if is_new else bound - n for t, n in zip(rows, padding, strict=True)]
            admits = [
                ops.admit(i, t[:n], num_compute_tokens=0, skip_prefix_lookup=is_new)
                for i, t, n in zip(ids, rows, known, strict=True)
            ]
            results = self._begin([*self._pending, *admits])[1][-len(rows) :]
            self._planes.finish()
            cached = [result.admit.num_cached_tokens for result in results]
            starts = [n + skip for n, skip in zip(cached, padding, strict=True)]
            if not any(cached) or (all(cached) and len(set(starts)) == 1):
                break
            self._pending, bound = [ops.free(list(ids))], min(starts) + 1
        self._pending, self._held.ids = [], set(ids)
        self.num_cached_tokens = cached
        self._rows = [_Row(i, skip, n) for i, skip, n in zip(ids, padding, cached, strict=True)]
        return [t[n:] for t, n in zip(rows, known, strict=True)]

    def _restore(self, cached: Sequence[int]) -> None:
        """Continue the rows' states from their checkpoints after ``cached`` tokens, if any."""
        model = self._model()
        if self._states is not None and model is not None and any(cached):
            pages = self._planes.backend.read_states(*self._checkpoints(cached))
            self._states.write(self.layers, pages, model.device)

    def _store(self, positions: Sequence[int]) -> None:
        """Store the rows' states as their checkpoints after ``positions`` tokens, 0 for none."""
        rows = [i for i, n in enumerate(positions) if n]
        if self._states is not None and rows:
            ids, entries = self._checkpoints(positions)
            pages = self._states.read(self.layers, rows).cpu()
            self._planes.backend.write_states(
                [ids[i] for i in rows], [entries[i] for i in rows], pages
            )

    def _checkpoints(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return each row's sequence, and the entry of its checkpoint in that one's table."""
        size = self._planes.block_size_tokens
        return [row.sequence_id for row in self._rows], [n // size - 1 for n in positions]

    def _append(
        self, ids: list[list[int]], ends: Sequence[int] | None = None, *, keep: bool = False
    ) -> Sequence[int]:
        """Append tokens to each row, and compute them, or up to position ``ends[i]``. ``keep``:
        whether a checkpoint is kept there. Returns where the plan keeps them, 0 for none.
        """
        sequence_ids = [row.sequence_id for row in self._rows]
        num_each = [len(tokens) for tokens in ids]
        lengths = [row.num_tokens for row in self._rows]
        num_slots = num_each
        if ends is not None:
            num_slots = [end - n for end, n in zip(ends, lengths, strict=True)]
        append = ops.append(
            sequence_ids,
            [token for tokens in ids for token in tokens],
            num_slots,
            first_positions=lengths,
            num_tokens=num_each,
            checkpoint_positions=ends if keep and ends is not None else 0,
        )
        result = self._begin([*self._pending, append])[1][-1]
        self._was_changed()
        self._rows = [
            replace(row, num_tokens=row.num_tokens + n)
            for row, n in zip(self._rows, num_slots, strict=True)
        ]
        return result.checkpoint_positions

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
        for layer in self.layers if self._states is not None else ():
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.reorder_cache(layer, torch.LongTensor(indices))


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
        cache._after(output)


def _is_finite(output: Any) -> bool:
    """Whether the last column of a pass, its logits or else its hidden states, has no NaN and no
    infinity but -infinity beside other numbers, which is how a token is forbidden.
    """
    tensors = output.values() if isinstance(output, dict) else output
    of_columns = (t for t in tensors if isinstance(t, torch.Tensor) and t.dim() == 3)
    found = next(of_columns, None)
    return found is None or bool(found[:, -1].amax(dim=-1).isfinite().all())


def _cache_in(kwargs: dict[str, Any]) -> PlaneCache | None:
    """Find the cache among a forward pass's arguments, whatever this release of transformers, or a
    model with code of its own, calls the argument.
    """
    return next((value for value in kwargs.values() if isinstance(value, PlaneCache)), None)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns [first, stop) of a pass. ``last``: number of last ones whose logits are wanted, 0 for
    all; ``padding``: columns of padding in each row.
    """

    first: int
    stop: int
    last: int
    padding: list[int]

    def checkpoint(self, start: int, block_size: int) -> int:
        """Return the last column, after ``start`` and before those whose logits are wanted, at
        which blocks of all rows end; 0 if there is none.
        """
        skip = self.padding[0] % block_size
        column = self.stop - self.last
        column -= (column - skip) % block_size
        is_common = all(each % block_size == skip for each in self.padding)
        is_inside = self.last > 0 and column > max(start, *self.padding)
        return column if is_common and is_inside else 0


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
