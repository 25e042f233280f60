"""The kernels on a GPU (csrc/cuda), or emulated: calls are queued on a stream and do not wait.

The native module is an argument: ``kvplane_kernels._cuda``, or the emulator's. Ids of blocks to
copy are on the host and are checked by the call; ids in device memory are checked by the
kernels, and ``check_faults`` reports the bad ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.kernels.arguments import (
    AttentionArguments,
    HostLengths,
    SharedPlans,
    WriteArguments,
    are_latents,
    check_result,
    require,
)
from data_plane.kernels.backends.bound_layers import BoundLayer, BoundLayers, of_tokens
from data_plane.kernels.backends.native import NativeKernels
from data_plane.kernels.device.cuda_streams import HostStreams, Streams
from data_plane.kernels.step_rows import StepRows
from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT

_FAULTS: Final = {
    "BAD_BLOCK_TABLES": (
        "block_tables",
        "must hold ids of the pages' blocks wherever a query token attends",
    ),
    "BAD_QUERY_STARTS": (
        "query_starts",
        "must ascend from 0 to num_tokens, by max_query_len at most",
    ),
    "BAD_CONTEXT_LENS": (
        "context_lens",
        "must cover the sequence's query tokens and fit its table",
    ),
    "BAD_SLOTS": ("slots", "must be slots of the pages"),
    "BAD_KEY_SCALES": ("key_scales", "must be finite and above 0"),
    "BAD_VALUE_SCALES": ("value_scales", "must be finite and above 0"),
    "BAD_WORKSPACE": ("workspace", "must have room for the partial results of the batch"),
}
MAX_WORKSPACE_BYTES: Final = 1 << 30
"""Bound in bytes of the workspaces of all calls together. Attention runs in several calls if one
would need more for its partial results. Fixed steps keep up to half of it.
"""
MAX_SHARED_PLANS: Final = 16
"""Maximum number of work plans kept for a batch. Callers choose each call's window, and so could
fill memory with them.
"""
_SHORT_ROWS: Final = 32
"""Maximum number of rows of a KV head in a short sequence, as in csrc/cuda/attention/cutting.h."""
_TENSOR_BYTES: Final = 256 << 20  # for queries, outputs and block tables beside the workspace
_FINDING_FAULTS: Final = ("reshape_and_cache", "paged_attention", "plan_attention")


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A work plan: how a batch is cut into items of work. ``native`` refers to ``memory``."""

    native: Any
    memory: torch.Tensor
    workspace_bytes: int
    """Bytes of the workspace of each call that uses the plan."""


class StepWorkspaces:
    """The workspaces of one device's fixed steps, each kept as long as a step uses it. All layer
    groups and sessions share them: the executor runs its steps one after another, on whatever
    streams. Only calls without rows can run beside a step, and these write no partial results.
    """

    def __init__(self, empty: Callable[[int], torch.Tensor]) -> None:
        self._empty = empty
        self._kept: list[weakref.ref[torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        return sum(workspace.numel() for workspace in self._there())

    @property
    def largest(self) -> int:
        return max((workspace.numel() for workspace in self._there()), default=0)

    def of(self, num_bytes: int) -> torch.Tensor:
        """Return the smallest workspace of at least ``num_bytes``, or a new one."""
        large = [workspace for workspace in self._there() if workspace.numel() >= num_bytes]
        if large:
            return min(large, key=torch.Tensor.numel)
        workspace = self._empty(num_bytes)
        self._kept.append(weakref.ref(workspace))
        return workspace

    def _there(self) -> list[torch.Tensor]:
        there = [(kept, kept()) for kept in self._kept]
        self._kept = [kept for kept, workspace in there if workspace is not None]
        return [workspace for _, workspace in there if workspace is not None]


class CudaKernels(NativeKernels):
    """The kernels on one GPU; ``data_plane.kernels.backend.Kernels`` describes the operations. Of
    tokens with equal slots, any one may be stored.

    module: the compiled one. device: of all tensors except pairs and block_ids.
    streams: those of the device; the emulator needs none.
    split_tokens: the context of a short query is split at multiples of it; a multiple of 64. The
        rounding of a result depends on it, and on nothing else in a batch.
    max_workspace_bytes: of one call and of fixed steps' workspaces together. A batch that needs
        more than is left is attended to in parts, with the same result. If the host does not know
        its lengths, and no workspace is given, it is refused if it could need more.
    share_reads: read the blocks that decodes share once for several of them. No bit depends on it;
        it can be turned off to measure its effect.
    """

    backend = "cuda"
    cache_kinds = (KEYS_AND_VALUES,)

    def __init__(
        self,
        module: ModuleType,
        device: torch.device,
        *,
        streams: Streams | None = None,
        split_tokens: int = 512,
        max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
        share_reads: bool = True,
    ) -> None:
        super().__init__(module, device)
        self.streams = streams if streams is not None else HostStreams()
        self.detail = ""
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            self.detail = f'device="{gpu.name}" arch=sm_{gpu.major}{gpu.minor}'
        self._index = device.index or 0
        self._split_tokens = split_tokens
        self._share_reads = share_reads
        self.max_workspace_bytes = max_workspace_bytes
        self._kept_by_steps = StepWorkspaces(self.empty)
        self._faults = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def device_uuid(self) -> str:
        uuid: str = self._module.device_uuid(self._index)
        return uuid

    def share_memory(self, num_bytes: int) -> Any:
        return self._module.allocate_shared(device=self._index, num_bytes=num_bytes)

    def bound_layers(self) -> QueuedLayers:
        return QueuedLayers(self)

    def step_memory(self) -> StepMemory:
        return StepMemory(self)

    def paged_attention(
        self,
        arguments: AttentionArguments,
        *,
        lse: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Compute attention as ``Kernels.paged_attention``. ``out``: of ``arguments.output_shape``
        and the query's dtype, contiguous. ``workspace``: uint8 [num_bytes], of
        ``attention_workspace_bytes``. Either is allocated if not given; a captured graph needs
        both, and ``arguments`` made before the capture. ``plan``: made for these lengths and
        tables; the workspace is then of ``plan.workspace_bytes``. Raises InvalidRequestError,
        before it allocates, if neither lengths nor a workspace is given and the tables have room
        for contexts that could need more than ``max_workspace_bytes``.
        """
        if plan is not None and workspace is None:
            workspace = self.empty(plan.workspace_bytes)
        if workspace is not None:
            check_result("workspace", workspace, (None,), torch.uint8, self.device)
            return self._attend_in(workspace, arguments, out, lse, plan)
        if arguments.lengths is None:
            return self._attend_in(self._workspace(arguments), arguments, out, lse)
        if arguments.plans is not None:
            plan = self.shared_plan(arguments, arguments.plans)
            if plan is not None:
                there = self.empty(plan.workspace_bytes)
                return self._attend_in(there, arguments, out, lse, plan)
        counts = self.count_partials(arguments)
        total = int(counts.sum())
        if total <= self.room(arguments):
            return self._attend_in(self._workspace(arguments, total), arguments, out, lse)
        if out is None:
            query = arguments.query
            out = torch.empty(arguments.output_shape, dtype=query.dtype, device=query.device)
        parts, num_bytes = [], 0
        for first, end in _parts(counts, self.room(arguments)):
            part, tokens = _part(arguments, arguments.lengths, first, end)
            needed = self.attention_workspace_bytes(part, int(counts[first:end].sum()))
            num_bytes = max(num_bytes, needed)
            parts.append((part, tokens))
        there = self.empty(num_bytes)
        for part, tokens in parts:
            of_part = None if lse is None else lse[tokens]
            self._attend_in(there, part, out[tokens], of_part)
        return out

    def plan(
        self,
        arguments: AttentionArguments,
        *,
        memory: torch.Tensor | None = None,
        num_partials: int | None = None,
    ) -> AttentionPlan:
        """Queue the planning for all calls with the same lengths and tables, and the same shapes,
        types, strides and window; the contents of the pages do not matter. ``memory``: uint8
        [num_bytes], of ``plan_bytes``; allocated if not given. ``num_partials``: partial results
        that workspaces have room for; None: as many as the lengths need, or, if the host does not
        know them, as the longest contexts would need.
        """
        if num_partials is None and arguments.lengths is not None:
            num_partials = int(self.count_partials(arguments).sum())
        return self._plan(arguments, num_partials, memory)

    def attention_workspace_bytes(
        self, arguments: AttentionArguments, num_partials: int | None = None
    ) -> int:
        """Return a workspace size in bytes that suffices for every batch of these shapes and this
        window with up to ``num_partials`` partial results; None: for any lengths.
        """
        if num_partials is None:
            num_partials = self.max_partials(arguments)
        num_bytes: int = super()._call(
            "attention_workspace_bytes", **self._sizes(arguments), num_partials=num_partials
        )
        return num_bytes

    def max_partials(self, arguments: AttentionArguments) -> int:
        """Return how many partial results a batch of these shapes and window needs at most."""
        count: int = super()._call(
            "max_partials",
            **self._sizes(arguments),
            max_blocks=arguments.block_tables.shape[1],
            options=self._options(arguments),
            split_tokens=self._split_tokens,
            max_query_len=arguments.max_query_len,
        )
        return count

    def count_partials(self, arguments: AttentionArguments) -> NDArray[np.int64]:
        """Return [num_sequences]: how many partial results each sequence needs, one for each split
        and query token, or none for a single split. ``arguments`` must have ``lengths``.
        """
        assert arguments.lengths is not None
        return self._count(self._sizes(arguments), self._options(arguments), arguments.lengths)

    def partials_counter(self, arguments: AttentionArguments) -> Callable[[HostLengths], int]:
        """Return a function that counts the partial results of lengths, keeping no tensor."""
        sizes, options = self._sizes(arguments), self._options(arguments)
        return lambda lengths: int(self._count(sizes, options, lengths).sum())

    def _count(
        self, sizes: dict[str, Any], options: Any, lengths: HostLengths
    ) -> NDArray[np.int64]:
        counts = np.empty(len(lengths.context_lens), np.int64)
        super()._call(
            "count_partials",
            **sizes | {"num_sequences": len(counts)},
            options=options,
            split_tokens=self._split_tokens,
            query_starts=lengths.query_starts.ctypes.data,
            context_lens=lengths.context_lens.ctypes.data,
            counts=counts.ctypes.data,
        )
        return counts

    @property
    def scratch_bytes(self) -> int:
        """Bytes on the device that calls need at most beside the pools: ``room`` and ``step_room``
        keep all workspaces, those of fixed steps too, within ``max_workspace_bytes``.
        """
        return self.max_workspace_bytes + _TENSOR_BYTES

    def room(self, arguments: AttentionArguments) -> int:
        """Return how many partial results one call's workspace may hold, beside fixed steps'."""
        kept = self._kept_by_steps.num_bytes
        return self._room_in(arguments, self.max_workspace_bytes - kept)

    def step_room(self, arguments: AttentionArguments) -> int:
        """Return how many partial results a workspace of ``step_workspace`` may hold."""
        kept = self._kept_by_steps
        new = self.max_workspace_bytes // 2 - kept.num_bytes
        return self._room_in(arguments, max(new, kept.largest))

    def step_workspace(self, num_bytes: int) -> torch.Tensor:
        """Return a workspace of at least ``num_bytes`` that fixed steps keep and share, since they
        run one after another.
        """
        return self._kept_by_steps.of(num_bytes)

    def _room_in(self, arguments: AttentionArguments, num_bytes: int) -> int:
        empty, one_more = (self.attention_workspace_bytes(arguments, n) for n in (0, 1 << 10))
        return max(0, num_bytes - empty) // max(1, (one_more - empty) >> 10)

    def _workspace(
        self, arguments: AttentionArguments, num_partials: int | None = None
    ) -> torch.Tensor:
        if num_partials is None:
            num_partials = self._most_partials(arguments)
        return self.empty(self.attention_workspace_bytes(arguments, num_partials))

    def _most_partials(self, arguments: AttentionArguments) -> int:
        """Return ``max_partials`` if the workspace has room for them. Raises InvalidRequestError
        otherwise: lengths that only the device knows cannot be divided among several calls.
        """
        most = self.max_partials(arguments)
        num_bytes = self.attention_workspace_bytes(arguments, most)
        require(
            most <= self.room(arguments),
            f"must be given, or a workspace: the longest contexts of these tables would need one "
            f"of {num_bytes} bytes, more than the {self.max_workspace_bytes} that calls may have",
            "lengths",
        )
        return most

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory on the device: uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @staticmethod
    def plan_key(arguments: AttentionArguments) -> tuple[object, ...]:
        """Return everything that a work plan depends on, except the lengths and tables."""
        return _plan_key(arguments.query, _key_of_pages(arguments))

    def shared_plan(
        self, arguments: AttentionArguments, plans: SharedPlans
    ) -> AttentionPlan | None:
        """Return the work plan that calls with the same lengths and tables share, and queue the
        making of one if there is none; None if its partial results do not fit in one workspace.
        """
        key = self.plan_key(arguments)
        if key not in plans.made:
            if len(plans.made) >= MAX_SHARED_PLANS:
                plans.made.clear()
            total = int(self.count_partials(arguments).sum())
            fits = total <= self.room(arguments)
            plans.made[key] = self._plan(arguments, total) if fits else None
        plan = plans.made[key]
        assert plan is None or isinstance(plan, AttentionPlan)
        return plan

    def plan_bytes(self, arguments: AttentionArguments) -> int:
        """Return the size in bytes of a work plan's memory."""
        num_sequences = arguments.context_lens.shape[0]
        num_bytes: int = super()._call("attention_plan_bytes", num_sequences=num_sequences)
        return num_bytes

    def _plan(
        self,
        arguments: AttentionArguments,
        num_partials: int | None,
        memory: torch.Tensor | None = None,
    ) -> AttentionPlan:
        a = arguments
        if num_partials is None:
            num_partials = self._most_partials(a)
        if memory is None:
            memory = self.empty(self.plan_bytes(a))
        native = self._call(
            "plan_attention",
            query=self._view(a.query),
            pages=self._pages(a),
            **self.batch_arguments(a),
            share_reads=self.may_share(a.lengths),
            is_padded=a.is_padded,
            options=self._options(a),
            max_query_len=a.max_query_len,
            max_short_query_len=_max_short_query_len(a),
            split_tokens=self._split_tokens,
            num_partials=num_partials,
            memory=memory.data_ptr(),
        )
        return AttentionPlan(native, memory, self.attention_workspace_bytes(a, num_partials))

    def _attend_in(
        self,
        workspace: torch.Tensor,
        arguments: AttentionArguments,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        try:
            return self._attend(
                arguments,
                out,
                lse,
                max_query_len=arguments.max_query_len,
                # A plan determines how wide its tiles are.
                max_short_query_len=0 if plan else _max_short_query_len(arguments),
                split_tokens=self._split_tokens,
                workspace=workspace.data_ptr(),
                workspace_bytes=workspace.numel(),
                plan=None if plan is None else plan.native,
                share_reads=self.may_share(arguments.lengths),
                is_padded=arguments.is_padded,
            )
        except ValueError as error:
            raise InvalidRequestError(str(error), field="plan") from None

    def _sizes(self, arguments: AttentionArguments) -> dict[str, Any]:
        return {
            "query": self._view(arguments.query),
            "pages": self._pages(arguments),
            "num_sequences": arguments.context_lens.shape[0],
        }

    def _pages(self, arguments: WriteArguments | AttentionArguments) -> Any:
        is_latent = are_latents(arguments.keys, arguments.values)
        wanted = f"must be of cache kind {KEYS_AND_VALUES}, the only one of these kernels"
        require(not is_latent, f"{wanted}, are of {LATENT}", "pages")
        return super()._pages(arguments)

    def queue_layer(self, write: WriteArguments, attention: AttentionArguments) -> QueuedLayer:
        """Make the arguments that stay the same for all calls with tensors like these."""
        a, of_heads = attention, (attention.slopes, attention.sinks, attention.seen_blocks)
        of_pages = {"pages": self._pages(a), "scales": self._scales(a)}
        options = {"options": self._options(a), "split_tokens": self._split_tokens}
        arguments = partial(
            AttentionArguments,
            pages=a.pages,
            options=a.options,
            key_scales=a.key_scales,
            value_scales=a.value_scales,
            of_heads=of_heads,
        )
        return QueuedLayer(of_pages, of_pages | options, _key_of_pages(a), arguments)

    def queue(self, name: str, tensors: dict[str, torch.Tensor], **arguments: Any) -> None:
        """Queue a native call whose tensors and other arguments have been checked."""
        self._call(
            name, **{key: self._view(tensor) for key, tensor in tensors.items()}, **arguments
        )

    def may_share(self, lengths: HostLengths | None) -> bool:
        """Return whether blocks that sequences of these lengths share are read once for several."""
        return self._share_reads and (lengths is None or lengths.tables_may_share)

    def check_faults(self) -> None:
        faults = int(self._faults.item())
        if faults:
            self._faults.zero_()
        for name, (field, wanted) in _FAULTS.items():
            if faults & int(getattr(self._module, name)):
                raise InvalidRequestError(wanted, field=field)

    def _call(self, name: str, **arguments: Any) -> Any:
        """Call a native function on the caller's stream, with the device as the current one."""
        if name in _FINDING_FAULTS:
            arguments["faults"] = self._faults.data_ptr()
        if self.device.type != "cuda":
            return super()._call(name, stream=0, **arguments)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            return super()._call(name, stream=stream, **arguments)


def _key_of_pages(arguments: AttentionArguments) -> tuple[object, ...]:
    """Return the part of a plan's key that does not depend on the query."""
    keys, values = arguments.keys, arguments.values
    between = values.data_ptr() - keys.data_ptr()
    strides = (keys.dtype, keys.shape, keys.stride(), values.shape, values.stride())
    hides = arguments.options.sliding_window_tokens, arguments.seen_blocks is not None
    return (*strides, keys.data_ptr() % 16, between, *hides)


def _plan_key(query: torch.Tensor, of_pages: tuple[object, ...]) -> tuple[object, ...]:
    return (query.dtype, query.shape, query.stride(), query.data_ptr() % 16, of_pages)


def _max_short_query_len(arguments: AttentionArguments) -> int:
    """Return the maximum number of query tokens of the batch's short sequences; 0 if the host does
    not know the lengths. Tiles are then wide enough for the rows of speculative sequences, also in
    a batch with a prefill, so that these read their keys and values once.
    """
    if arguments.lengths is None:
        return 0
    group = arguments.query.shape[1] // arguments.keys.shape[1]
    query_lens = np.diff(arguments.lengths.query_starts)
    is_short = (query_lens == 1) | (query_lens * group <= _SHORT_ROWS)
    return int(query_lens[is_short].max(initial=0))


def _parts(counts: NDArray[np.int64], room: int) -> Iterator[tuple[int, int]]:
    """Divide sequences into consecutive ranges whose partial results fit in ``room``; a range of
    one sequence may exceed it.
    """
    first = total = 0
    for i, count in enumerate(counts.tolist()):
        if total + count > room and i > first:
            yield first, i
            first, total = i, 0
        total += count
    yield first, len(counts)


def _part(
    arguments: AttentionArguments, lengths: HostLengths, first: int, end: int
) -> tuple[AttentionArguments, slice]:
    """Return the arguments of sequences ``first`` to ``end`` - 1, and their query tokens."""
    tokens = slice(int(lengths.query_starts[first]), int(lengths.query_starts[end]))
    part = replace(
        arguments,
        query=arguments.query[tokens],
        block_tables=arguments.block_tables[first:end],
        query_starts=arguments.query_starts[first : end + 1] - tokens.start,
        context_lens=arguments.context_lens[first:end],
        options=arguments.options.of_sequences(first, end),
        lengths=lengths.of(first, end),
        plans=None,
    )
    return part, tokens


@dataclass(frozen=True, slots=True)
class QueuedLayer:
    """The checked arguments of one layer that do not change between calls. It keeps no tensor of a
    caller or of a batch. ``key_of_pages``: what the layer's pages add to the key of a work plan.
    ``arguments`` builds the arguments of an attention call from a query and a batch's tables and
    lengths.
    """

    write: dict[str, Any]
    attend: dict[str, Any]
    key_of_pages: tuple[object, ...]
    arguments: Callable[..., AttentionArguments]


class QueuedLayers(BoundLayers):
    """Binds the layers of one shard on a GPU. A call queues the kernels on the caller's stream."""

    def __init__(self, kernels: CudaKernels) -> None:
        super().__init__(kernels.queue_layer)
        self._kernels = kernels

    def write(
        self, bound: BoundLayer, batch: StepRows, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Queue the write of a bound layer that fits the batch."""
        assert value is not None, "a GPU keeps no latents"
        self._kernels.queue(
            "reshape_and_cache",
            {"key": of_tokens(key), "value": of_tokens(value)},
            slots=batch.slots.data_ptr(),
            **bound.native.write,
        )

    def attend(
        self, bound: BoundLayer, batch: StepRows, query: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Queue attention for a bound layer; ``find`` has said that the layer fits the batch.
        Returns ``out`` if given, else a new tensor. The first call of a batch queues its work plan
        too.
        """
        kernels, layer, rows = self._kernels, bound.native, of_tokens(query)
        if out is None:
            out = torch.empty(bound.output_shape, dtype=query.dtype, device=query.device)
        key, made = _plan_key(rows, layer.key_of_pages), batch.plans.made
        plan = made.get(key)
        if plan is None:
            arguments = layer.arguments(
                query=rows,
                block_tables=batch.block_tables,
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                max_query_len=batch.max_tokens,
                lengths=batch.lengths,
                plans=batch.plans,
                is_padded=batch.is_padded,
            )
            plan = kernels.shared_plan(arguments, batch.plans)
            if plan is None:  # in parts
                kernels.paged_attention(arguments, out=out.view(-1, *out.shape[-2:]))
                return out
        assert isinstance(plan, AttentionPlan)
        workspace = kernels.empty(plan.workspace_bytes)
        kernels.queue(
            "paged_attention",
            {"query": rows},
            out=out.data_ptr(),
            lse=0,
            max_query_len=batch.max_tokens,
            max_short_query_len=0,  # the plan's
            workspace=workspace.data_ptr(),
            workspace_bytes=plan.workspace_bytes,
            plan=plan.native,
            **layer.attend,
            **self.batch(batch),
        )
        return out

    def _bind_batch(self, batch: StepRows) -> dict[str, Any]:
        may_share = self._kernels.may_share(batch.lengths)
        shared = {"share_reads": may_share, "is_padded": batch.is_padded}
        return self._kernels.batch_arguments(batch) | shared


@dataclass(slots=True)
class _Buffers:
    """Memory for a work plan and a workspace, shared by all calls that can share the plan."""

    plan_memory: torch.Tensor
    workspace: torch.Tensor
    num_partials: int
    """Number of partial results for which the workspace has room."""
    count: Callable[[HostLengths], int] | None
    """Counts the partial results of a batch; None where there is room for any batch."""
    plan: Any = None
    """The work plan queued in this step; None before."""


class StepMemory:
    """Work plans and workspaces for the fixed steps of one layer group. The first call of a kind
    allocates memory for every batch of its shapes, as far as ``CudaKernels.step_room`` allows;
    later calls allocate nothing.
    """

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels
        self._buffers: dict[tuple[object, ...], _Buffers] = {}

    def begin(self) -> None:
        """Begin a step before its first layer: work plans are made again for its lengths."""
        for buffers in self._buffers.values():
            buffers.plan = None

    def attend(self, arguments: AttentionArguments, out: torch.Tensor | None) -> torch.Tensor:
        """Compute attention as ``CudaKernels.paged_attention``. A step's first layer that needs a
        work plan queues it too. Raises InvalidRequestError if memory would have to be allocated
        during a capture.
        """
        key = self._kernels.plan_key(arguments)
        buffers = self._buffers.get(key)
        if buffers is None:
            if is_capturing(self._kernels.device):
                raise InvalidRequestError(
                    "call each layer once with tensors like these before they are captured, so "
                    "that their memory is allocated",
                    field="query",
                )
            buffers = self._buffers[key] = self._new_buffers(arguments)
        if buffers.plan is None:
            buffers.plan = self._kernels.plan(
                arguments, memory=buffers.plan_memory, num_partials=buffers.num_partials
            )
        return self._kernels.paged_attention(
            arguments, out=out, workspace=buffers.workspace, plan=buffers.plan
        )

    def check_room(self, lengths: HostLengths) -> None:
        """Raise InvalidRequestError unless workspaces have room for a batch of these lengths."""
        for buffers in self._buffers.values():
            count = 0 if buffers.count is None else buffers.count(lengths)
            if count > buffers.num_partials:
                raise InvalidRequestError(
                    f"the contexts need {count} partial results, and there is room for "
                    f"{buffers.num_partials}: run the plan layer by layer",
                    field="bounds.context_tokens",
                )

    def _new_buffers(self, arguments: AttentionArguments) -> _Buffers:
        kernels = self._kernels
        most = kernels.max_partials(arguments)
        num_partials = min(most, kernels.step_room(arguments))
        num_bytes = kernels.attention_workspace_bytes(arguments, num_partials)
        return _Buffers(
            kernels.empty(kernels.plan_bytes(arguments)),
            kernels.step_workspace(num_bytes),
            num_partials,
            kernels.partials_counter(arguments) if num_partials < most else None,
        )


def is_capturing(device: torch.device) -> bool:
    """Return whether the caller's stream of the device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
