"""Reads and writes whole blocks of an executor: those of sequences' tables, to move them between
pools, and published ones, for a file tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.execution import opaque_pages
from data_plane.execution.commands import Commands
from data_plane.execution.layers import layer_range
from data_plane.execution.plan_runner import PlanRunner
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.arguments import require
from data_plane.plans.batches.attention_batch import AttentionBatch
from data_plane.plans.contents.reused_blocks import ReusedBlocks, ReusedPrefix
from data_plane.plans.plan_columns import Mask
from data_plane.plans.sessions import RunningPlan, Sessions
from data_plane.plans.tables.block_tables import BlockTables, Table, taken_away
from data_plane.tier_keys import check_group, tier_key_of, tier_of
from kvplane.errors import (
    BlockNotWrittenError,
    InvalidRequestError,
    PlanOutOfOrderError,
    StaleGenerationError,
)
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb


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


class _Found(NamedTuple):
    """Blocks of one tier that a request reads: ``places`` in its answer, and how many leading slots
    of each may be read.
    """

    places: NDArray[np.int64]
    part: Table
    num_slots: NDArray[np.int64]


class _Write(NamedTuple):
    """A range of blocks to write, and the tokens of the span that they hold."""

    batch: AttentionBatch
    span: int
    blocks: BlockRange
    tokens: range


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
            layers = self._layers_of(blocks)
            found, refs = self._of_table(session_id, blocks, entries, only_written=only_written)
            _, part, num_slots = found
            return self._compute.read(part.tier_key, part.blocks, layers, num_slots), refs

    def read_pinned(
        self, grant: plan_pb2.PinGrant, blocks: BlockRange, entries: Sequence[int]
    ) -> torch.Tensor:
        """Read pinned blocks, as ``Executor.read_blocks`` does those of a table. ``grant``: that of
        ``Executor.open_pins``. ``entries``: of its blocks of the group, counted from 0.

        A grant that outlives its pin is as good as long as its blocks hold what they held: raises
        StaleGenerationError when one of them has been allocated again, and InvalidRequestError.
        """
        with self._command.lock, self._command("read_pinned"):
            layers = self._layers_of(blocks)
            found = self._of_pins(grant, blocks.group, entries)
            parts = [
                self._compute.read(each.part.tier_key, each.part.blocks, layers, each.num_slots)
                for each in found
            ]
            if len(found) == 1:
                return parts[0]
            joined = parts[0].new_empty((len(layers), len(entries), *parts[0].shape[2:]))
            for each, part in zip(found, parts, strict=True):
                joined[:, torch.from_numpy(each.places)] = part.to(joined.device)
            return joined

    @contextmanager
    def pages(
        self,
        source: int | plan_pb2.PinGrant,
        blocks: BlockRange,
        entries: Sequence[int],
        keys: Sequence[bytes],
    ) -> Iterator[tuple[list[memoryview], pb.Blocks | None]]:
        """Lend opaque pages in the form that ``opaque_pages.read`` returns. ``source``: a session's
        id, to read one of its tables, or a grant. For a table, yields its blocks too.
        """
        opaque_pages.check_keys(keys, len(entries))
        with ExitStack() as stack:
            stack.enter_context(self._command.lock)
            stack.enter_context(self._command("read_pages"))
            refs = None
            if isinstance(source, int):
                of_table, refs = self._of_table(source, blocks, entries, only_written=False)
                found = [of_table]
            else:
                found = self._of_pins(source, blocks.group, entries)
            pages = [memoryview(b"")] * len(entries)
            for places, part, _ in found:
                rows = stack.enter_context(self._compute.rows(part.tier_key, part.blocks))
                at = places.tolist()
                of_rows = [keys[i] for i in at] if len(keys) else []
                for i, page in zip(at, opaque_pages.read(rows, of_rows), strict=True):
                    pages[i] = page
            yield pages, refs

    def _layers_of(self, blocks: BlockRange) -> range:
        check_group(blocks.group, self._layout, "group")
        held = self._shard.group_layers(self._layout, blocks.group)
        return layer_range(held, blocks.first_layer, blocks.num_layers)

    def _of_pins(
        self, grant: plan_pb2.PinGrant, group: int, entries: Sequence[int]
    ) -> list[_Found]:
        """Return what a grant's entries of a group are, by tier. Raises as ``read_pinned``."""
        check_group(group, self._layout, "group")
        groups = np.asarray(columns.read(UINT8, grant.groups, "pin_grant.groups"))
        given = (
            np.asarray(columns.read(kind, column, "pin_grant.blocks", length=len(groups)))
            for kind, column in (
                (UINT8, grant.tiers),
                (INT32, grant.indices),
                (INT64, grant.generations),
            )
        )
        tiers, blocks, generations = (column[groups == group] for column in given)
        places = _check_places(entries, len(blocks), "the grant has", blocks < 0)
        found = []
        for tier in sorted({*tiers[places].tolist()}):
            at = np.flatnonzero(tiers[places] == tier)
            chosen = places[at]
            part = Table(tier_key_of(group, tier), blocks[chosen], generations[chosen])
            self._check_present(part, at)
            found.append(_Found(at, part, np.full(len(at), self._tables.block_size_tokens)))
        return found

    def _check_present(self, part: Table, places: NDArray[np.int64]) -> None:
        """Check that blocks still hold what was published in them. ``places``: in the request."""
        present = self._tables.generations[part.tier_key][part.blocks] == part.generations
        if not present.all():
            raise StaleGenerationError(
                "the block has been allocated again since its pin ended: look the prompt up again",
                field=f"entries[{places[int(present.argmin())]}]",
            )
        is_whole = (
            self._tables.num_written[part.tier_key][part.blocks] == self._tables.block_size_tokens
        )
        if not is_whole.all():
            raise BlockNotWrittenError(
                "the block is not whole", field=f"entries[{places[int(is_whole.argmin())]}]"
            )

    def _of_table(
        self, session_id: int, blocks: BlockRange, entries: Sequence[int], *, only_written: bool
    ) -> tuple[_Found, pb.Blocks]:
        latest = self._sessions.get(session_id).latest
        if latest is not None:
            latest.check_transferred()
        layers = self._layers_of(blocks)
        held = self._shard.group_layers(self._layout, blocks.group)
        table = self._tables.get(session_id, blocks.sequence_id, "sequence_id", blocks.group)
        places = _check_entries(table, entries)
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
        return _Found(np.arange(len(places)), part, counts), refs

    def write(
        self,
        session_id: int,
        blocks: Sequence[BlockRange],
        data: torch.Tensor,
        plan_number: int | None,
    ) -> pb.SignedPayload | None:
        """Write blocks as ``Executor.write_blocks``: those of one range after those of another, all
        in the same layers.
        """
        with self._command.lock, self._command("write_blocks"):
            layers = self._layers_of(blocks[0])
            self._compute.check_blocks(blocks[0].group, layers, data)
            if blocks[0].group == self._layout.state_group:
                return self._write_checkpoints(session_id, blocks, layers, data, plan_number)

            def write_one(at: int, write: _Write) -> None:
                given = data[:, at : at + write.blocks.num_blocks]
                first, tokens = write.blocks.first_block, write.tokens
                self._compute.write_span(write.batch, write.span, layers, first, given, tokens)

            return self._write(session_id, blocks, plan_number, write_one)

    def write_pages(
        self,
        session_id: int,
        blocks: Sequence[BlockRange],
        pages: torch.Tensor,
        num_bytes: Sequence[int],
        keys: Sequence[bytes],
        plan_number: int | None,
    ) -> pb.SignedPayload | None:
        """Write opaque pages as ``write`` does blocks. ``pages``, ``num_bytes`` and ``keys``: as of
        ``opaque_pages.Pages``.
        """
        with self._command.lock, self._command("write_pages"):
            group = check_group(blocks[0].group, self._layout, "group")
            page_bytes = self._layout.groups[group].page_bytes
            given = opaque_pages.Pages(pages, page_bytes, num_bytes, keys)

            def write_one(at: int, write: _Write) -> None:
                first = int(write.batch.first_positions[write.span]) + write.tokens.start
                skipped = first // self._tables.block_size_tokens - write.blocks.first_block
                with self._compute.span_rows(write.batch, write.span, write.tokens) as rows:
                    given.write(at + skipped, rows)

            return self._write(session_id, blocks, plan_number, write_one)

    def _write(
        self,
        session_id: int,
        blocks: Sequence[BlockRange],
        plan_number: int | None,
        write_one: Callable[[int, _Write], None],
    ) -> pb.SignedPayload | None:
        """Check all ranges, and then write each. ``write_one`` is given the index of a range's
        first block.
        """
        session, run = self._plans.latest(session_id, plan_number)
        if run.pass_index is not None:
            raise PlanOutOfOrderError(
                "the plan is computed in passes: send its layers", field="plan.number"
            )
        group, layers = blocks[0].group, self._layers_of(blocks[0])
        batch = self._plans.batch(run, group)
        held = self._shard.group_layers(self._layout, group)
        of_shard = [self._layers.index(held[layer]) for layer in layers]
        writes, num_blocks = list[_Write](), 0
        for each in blocks:
            span = batch.span_of(each.sequence_id, f"sequence_ids[{num_blocks}]")
            num_blocks += each.num_blocks
            tokens = self._compute.tokens_of(batch, span, each.first_block, each.num_blocks)
            run.progress.check_no_gap(of_shard, span, tokens.start)
            writes.append(_Write(batch, span, each, tokens))
        if not run.is_complete:
            self._plans.write_checks.check_may_write(session, run)
            at = 0
            for write in writes:
                write_one(at, write)
                run.progress.extend(of_shard, write.span, write.tokens.stop)
                at += write.blocks.num_blocks
        return self._plans.receipt(session, run)

    def _write_checkpoints(
        self,
        session_id: int,
        blocks: Sequence[BlockRange],
        layers: range,
        data: torch.Tensor,
        plan_number: int | None,
    ) -> pb.SignedPayload | None:
        """Write checkpoints of the latest plan, each whole in some layers. ``data``: checked."""
        session, run = self._plans.latest(session_id, plan_number)
        places = [(r.sequence_id, r.first_block + i) for r in blocks for i in range(r.num_blocks)]
        checkpoints = run.checkpoints
        assert checkpoints is not None
        found = [checkpoints.find(*place, i) for i, place in enumerate(places)]
        if not run.is_complete:
            self._plans.write_checks.check_may_write(session, run)
            ids = checkpoints.written_blocks[found]
            self._compute.write_whole(checkpoints.group, layers, ids, data)
            for i in found:
                checkpoints.progress.extend(layers, i, 1)
        return self._plans.receipt(session, run)

    def of_span(
        self, session_id: int, sequence_id: int, plan_number: int
    ) -> tuple[range, list[int], bool]:
        """Return three things about a sequence in the session's latest plan, which must have
        ``plan_number``: the table entries that the plan computes, the same in each layer group; the
        entries that get a checkpoint at their end; and whether blocks and checkpoints may be loaded
        from files. Raises the errors of ``PlanRunner.latest``, and InvalidRequestError when the
        plan computes nothing for the sequence.
        """
        with self._command.lock, self._command("span_blocks"):
            _, run = self._plans.latest(session_id, plan_number)
            batch, checkpoints = run.whole[0], run.checkpoints
            span = batch.span_of(sequence_id)
        first, size = int(batch.first_positions[span]), self._layout.block_size_tokens
        last = first + int(batch.starts[span + 1] - batch.starts[span]) - 1
        kept = []
        if checkpoints is not None:
            kept = checkpoints.entries[checkpoints.sequence_ids == sequence_id].tolist()
        return range(first // size, last // size + 1), kept, not run.skips_files

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
            for publications in self._tables.publications:
                publications.on_keep = reused.published

    def take_reused(self) -> list[ReusedPrefix]:
        """Return the recorded prefixes that are published, each once."""
        with self._command.lock, self._command("take_reused"):
            return [] if self._plans.reused is None else self._plans.reused.take()

    def drop_reused(self, tenant: str | None) -> None:
        """Drop the recorded prefixes of a tenant, or of all tenants for None."""
        with self._command.lock, self._command("drop_reused"):
            if self._plans.reused is not None:
                self._plans.reused.drop(tenant)

    def read_published(self, group: int, block: int, generation: int) -> torch.Tensor | None:
        """Read all layers of a published device block of a layer group, as [num_layers, 1, ...]
        like ``Executor.read_blocks``. Returns None if the block is no longer published, or has
        another generation.
        """
        with self._command.lock, self._command("read_published"):
            device = tier_key_of(group, pb.TIER_DEVICE)
            is_present = self._tables.generations[device][block] == generation
            if not is_present or not self._tables.publications[group].published[block]:
                return None
            layers = range(len(self._shard.group_layers(self._layout, group)))
            full = np.array([self._tables.block_size_tokens])
            return self._compute.read(device, np.array([block], np.int32), layers, full)

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
    return _check_places(entries, len(table.blocks), "the table has", table.generations == 0)


def _check_places(
    entries: Sequence[int], length: int, has: str, is_trimmed: Mask
) -> NDArray[np.int64]:
    """Return ``entries`` as an array. Raises InvalidRequestError when it is empty, or names entries
    that there are not or that ``is_trimmed`` has.
    """
    require(len(entries) > 0, "must have at least one entry", "entries")
    places = np.asarray(entries, np.int64)
    is_there = (places >= 0) & (places < length)
    is_there[is_there] = ~is_trimmed[places[is_there]]
    if not is_there.all():
        first = int(is_there.argmin())
        raise InvalidRequestError(
            f"there is no entry {places[first]}: {has} {length} entries, of which "
            f"{int(is_trimmed.sum())} lie behind the attention window, or have no checkpoint",
            field=f"entries[{first}]",
        )
    return places


def _check_written(latest: RunningPlan, group: int, part: Table) -> None:
    """Raise PlanOutOfOrderError while the session's latest plan computes one of these blocks. All
    blocks of its other plans are written, and all that it can use of other sessions.
    """
    if latest.receipt is not None or part.tier_key != tier_key_of(group, pb.TIER_DEVICE):
        return
    writes = latest.writes[group]
    if np.isin(part.blocks, writes.written_blocks).any():
        raise PlanOutOfOrderError(
            f"plan {latest.number} computes these blocks: finish it first", field="sequence_id"
        )
