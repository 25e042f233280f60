"""Reads and writes whole blocks of an executor: those of sequences' tables, to move them between
pools, and published ones, for a file tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.execution.commands import Commands
from data_plane.execution.layers import layer_range
from data_plane.execution.plan_runner import PlanRunner
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.arguments import require
from data_plane.plans.contents.reused_blocks import ReusedBlocks, ReusedPrefix
from data_plane.plans.sessions import RunningPlan, Sessions
from data_plane.plans.tables.block_tables import BlockTables, Table, taken_away
from data_plane.tier_keys import check_group, tier_key_of, tier_of
from kvplane.errors import InvalidRequestError, PlanOutOfOrderError, StaleGenerationError
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.wire.v1 import types_pb2 as pb

_DEVICE = tier_key_of(0, pb.TIER_DEVICE)


class BlockRange(NamedTuple):
    """A range of a sequence's table entries, in some layers of a layer group. ``num_layers``: from
    the model's layer ``first_layer`` on; 0 for all that the shard holds.
    """

    sequence_id: int
    first_block: int
    num_blocks: int
    group: int = 0
    first_layer: int = 0
    num_layers: int = 0


class TableBlocks:
    """Reads and writes blocks of one executor, and notes which published prefixes are reused.
    Thread-safe: each method is a command of the executor.
    """

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tables: BlockTables,
        sessions: Sessions,
        plans: PlanRunner,
        compute: ShardKernels,
        command: Commands,
    ) -> None:
        """``command``: wraps methods in commands."""
        self._layout = layout
        self._shard = shard
        self._layers = shard.layers(layout)
        self._tables = tables
        self._sessions = sessions
        self._plans = plans
        self._compute = compute
        self._command = command

    def read(
        self,
        session_id: int,
        blocks: BlockRange,
        entries: Sequence[int],
        *,
        only_written: bool = False,
    ) -> tuple[torch.Tensor, pb.Blocks]:
        """Read blocks as ``Executor.read_blocks`` does. ``blocks``: where ``entries`` are.
        ``only_written``: whether to refuse blocks that the session's latest plan computes and has
        not written.
        """
        with self._command.lock, self._command("read_blocks"):
            return self._read(session_id, blocks, entries, only_written=only_written)

    def _read(
        self, session_id: int, blocks: BlockRange, entries: Sequence[int], *, only_written: bool
    ) -> tuple[torch.Tensor, pb.Blocks]:
        latest = self._sessions.get(session_id).latest
        if latest is not None:
            latest.check_transferred()
        check_group(blocks.group, self._layout, "group")
        table = self._tables.get(session_id, blocks.sequence_id, "sequence_id", blocks.group)
        places = _check_entries(table, entries)
        held = self._shard.group_layers(self._layout, blocks.group)
        layers = layer_range(held, blocks.first_layer, blocks.num_layers)
        part = table.at(places)
        if self._tables.first_stale([part]) is not None:
            raise StaleGenerationError(taken_away(blocks.sequence_id), field="sequence_id")
        if only_written and latest is not None:
            _check_written(latest, blocks.group, part)
        counts = self._plans.num_readable(
            latest, blocks.sequence_id, blocks.group, [held[i] for i in layers], part, places
        )
        refs = pb.Blocks(
            group=blocks.group,
            tier=tier_of(part.tier_key),
            indices=part.blocks.astype("<i4").tobytes(),
            generations=part.generations.astype("<i8").tobytes(),
        )
        return self._compute.read(part.tier_key, part.blocks, layers, counts), refs

    def write(
        self, session_id: int, blocks: BlockRange, data: torch.Tensor, plan_number: int | None
    ) -> pb.SignedPayload | None:
        """Write blocks as ``Executor.write_blocks``; the number of blocks is that of ``data``."""
        with self._command.lock, self._command("write_blocks"):
            return self._write(session_id, blocks, data, plan_number)

    def _write(
        self, session_id: int, blocks: BlockRange, data: torch.Tensor, plan_number: int | None
    ) -> pb.SignedPayload | None:
        session, run = self._plans.latest(session_id, plan_number)
        if run.pass_index is not None:
            raise PlanOutOfOrderError(
                "the plan is computed in passes: send its layers", field="plan.number"
            )
        batch = self._plans.batch(run, check_group(blocks.group, self._layout, "group"))
        span = batch.span_of(blocks.sequence_id)
        held = self._shard.group_layers(self._layout, blocks.group)
        layers = layer_range(held, blocks.first_layer, blocks.num_layers)
        tokens = self._compute.check_blocks(batch, span, layers, blocks.first_block, data)
        of_shard = [self._layers.index(held[layer]) for layer in layers]
        run.progress.check_no_gap(of_shard, span, tokens.start)
        if not run.is_complete:
            self._plans.write_checks.check_may_write(session, run)
            self._compute.write_span(batch, span, layers, blocks.first_block, data, tokens)
            run.progress.extend(of_shard, span, tokens.stop)
        return self._plans.receipt(session, run)

    def of_span(self, session_id: int, sequence_id: int, plan_number: int) -> range:
        """Return the table entries that ``write`` writes for a sequence of the latest plan, the
        same in each layer group. Raises as ``PlanRunner.latest``, and InvalidRequestError when the
        plan computes nothing for it.
        """
        with self._command.lock, self._command("span_blocks"):
            _, run = self._plans.latest(session_id, plan_number)
            batch = run.whole[0]
            span = batch.span_of(sequence_id)
        first, size = int(batch.first_positions[span]), self._layout.block_size_tokens
        last = first + int(batch.starts[span + 1] - batch.starts[span]) - 1
        return range(first // size, last // size + 1)

    @property
    def num_published(self) -> int:
        """Number of device blocks with a publication, of all layer groups."""
        return sum(map(len, self._tables.publications))

    @property
    def is_watched(self) -> bool:
        """Return whether a file tier is notified of reused prefixes."""
        return self._plans.reused is not None

    def watch_reuse(self, on_reuse: Callable[[], None], num_uses: int = 2) -> None:
        """Record from now on which published prefixes new sequences find. ``on_reuse`` is called,
        inside a command, when ``take_reused`` may have more. ``num_uses``: as in ``ReusedBlocks``.
        """
        with self._command.lock, self._command("watch_reuse"):
            reused = self._plans.reused = ReusedBlocks(self._tables, on_reuse, num_uses)
            self._tables.publications[0].on_keep = reused.published

    def take_reused(self) -> list[ReusedPrefix]:
        """Return the recorded prefixes that are published, each once."""
        with self._command.lock, self._command("take_reused"):
            return [] if self._plans.reused is None else self._plans.reused.take()

    def drop_reused(self, tenant: str | None) -> None:
        """Drop the recorded prefixes of a tenant, or of all tenants for None."""
        with self._command.lock, self._command("drop_reused"):
            if self._plans.reused is not None:
                self._plans.reused.drop(tenant)

    def read_published(self, block: int, generation: int) -> torch.Tensor | None:
        """Read all layers of a published device block, as [num_layers, 1, ...] like
        ``Executor.read_blocks``. Returns None if the block is no longer published, or has another
        generation.
        """
        with self._command.lock, self._command("read_published"):
            is_present = self._tables.generations[_DEVICE][block] == generation
            if not is_present or not self._tables.publications[0].published[block]:
                return None
            layers = range(len(self._shard.group_layers(self._layout, 0)))
            full = np.array([self._tables.block_size_tokens])
            return self._compute.read(_DEVICE, np.array([block], np.int32), layers, full)

    def scope_of(self, session_id: int) -> tuple[str, str]:
        """Return a session's tenant and namespace. Raises SessionExpiredError,
        InvalidRequestError.
        """
        with self._command.lock, self._command("scope_of"):
            session = self._sessions.get(session_id)
            require(session.namespace is not None, "must say the namespace", "grant.namespace")
            return session.tenant, session.namespace or ""


def _check_entries(table: Table, entries: Sequence[int]) -> NDArray[np.int64]:
    """Return ``entries`` as an array. Raises InvalidRequestError when it is empty or names entries
    that the table does not have.
    """
    require(len(entries) > 0, "must have at least one entry", "entries")
    places = np.asarray(entries, np.int64)
    length = len(table.blocks)
    missing = np.flatnonzero((places < table.num_trimmed) | (places >= length))
    if len(missing):
        raise InvalidRequestError(
            f"there is no entry {places[missing[0]]}: the table has {length} entries, of which the "
            f"first {table.num_trimmed} were trimmed",
            field=f"entries[{missing[0]}]",
        )
    return places


def _check_written(latest: RunningPlan, group: int, part: Table) -> None:
    """Raise PlanOutOfOrderError while the session's latest plan computes one of these blocks. All
    blocks of its other plans are written, and all that it can use of other sessions.
    """
    if latest.receipt is not None or part.tier_key != tier_key_of(group, pb.TIER_DEVICE):
        return
    if np.isin(part.blocks, latest.whole[group].written_blocks).any():
        raise PlanOutOfOrderError(
            f"plan {latest.number} computes these blocks: finish it first", field="sequence_id"
        )
