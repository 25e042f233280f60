"""Faults in the tables of a data plane, in what plans allocate and in what is cleared of it.

Planted by ``data_mutants``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from data_plane.execution import executor, plan_runner
from data_plane.execution.shards import shard_kernels
from data_plane.plans import sessions, write_checks
from data_plane.plans.batches import attention_batch, transfers
from data_plane.plans.contents import last_tenants, written_slots
from data_plane.plans.tables import allocations, block_tables, table_changes
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb

_allocate_new = allocations.NewBlocks.allocate
_allocate = block_tables.BlockTables.allocate


def _nothing(*_args: Any, **_options: Any) -> None:
    return None


def generation_unchecked() -> None:
    table_changes._check_generations = _nothing


def stale_references_unchecked() -> None:
    """A table may go on referring to a block that its session allocates for another."""
    table_changes._check_own_tables = _nothing


def stale_entries_readable() -> None:
    """A sequence whose blocks were given to another session is read as before."""
    block_tables.BlockTables.first_stale = _nothing  # type: ignore[method-assign]


def finished_plans_attend_for_ever() -> None:
    """Only when a plan starts is it checked that its tables are not stale."""
    write_checks.WriteChecks.check_still_current = _nothing  # type: ignore[method-assign]


def truncation_keeps_one_too_many() -> None:
    shorten = table_changes._Changer._shorten

    def keep_one_more(self: Any, old: Any, kind: int, num_blocks: int, i: int) -> Any:
        if kind == plan_pb2.TABLE_CHANGE_KIND_TRUNCATE and num_blocks < len(old.blocks):
            num_blocks += 1
        return shorten(self, old, kind, num_blocks, i)

    table_changes._Changer._shorten = keep_one_more  # type: ignore[method-assign]


def kept_tables_are_counted_whole() -> None:
    """What a plan leaves of a table counts as before, with what is cut off."""

    def keep(self: Any, _resync: bool, group: int, sequence_id: int, num: int, i: int) -> Any:
        before = self._before.pop((group, sequence_id))
        self._counts.add(before)
        return self._prefix(before, num, i)

    table_changes._Changer._keep = keep  # type: ignore[method-assign]


def all_that_is_kept_is_counted() -> None:
    """What is kept is taken away and added, however long."""

    def keep(self: Any, _resync: bool, group: int, sequence_id: int, num: int, i: int) -> Any:
        made = self._prefix(self._before.pop((group, sequence_id)), num, i)
        self._counts.add(made)
        return made

    table_changes._Changer._keep = keep  # type: ignore[method-assign]


def tables_are_kept_twice() -> None:
    keep = table_changes._Changer._keep

    def keep_again(self: Any, resync: bool, group: int, sequence_id: int, *rest: int) -> Any:
        before = self._before.get((group, sequence_id))
        made = keep(self, resync, group, sequence_id, *rest)
        self._before[group, sequence_id] = before
        return made

    table_changes._Changer._keep = keep_again  # type: ignore[method-assign]


def tables_are_kept_of_plans_that_never_ran() -> None:
    place = sessions.Session.continued

    def place_any(self: Any, plan: plan_pb2.Plan, digest: bytes) -> Any:
        plan.finished = 0
        return place(self, plan, digest)

    sessions.Session.continued = place_any  # type: ignore[method-assign]


def trimmed_entries_readable() -> None:
    """A trimmed table counts as one that begins with block 0."""
    shorten = table_changes._Changer._shorten

    def forget(self: Any, *args: Any) -> Any:
        made = shorten(self, *args)
        return None if made is None else replace(made, num_trimmed=0)

    table_changes._Changer._shorten = forget  # type: ignore[method-assign]


def trimmed_entries_attended() -> None:
    """Any window may be asked for, whatever was trimmed."""
    shard_kernels.check_window = _nothing


def allocations_keep_their_generation() -> None:
    """Blocks for no table keep generation and publication."""

    def allocate(self: Any, tables: Any) -> Any:
        generations = {tier_key: g.copy() for tier_key, g in tables.generations.items()}
        published = tables.publications[0].published.copy()
        allocated = _allocate_new(self, tables)
        others = (column[len(self._entries) :] for column in (self._tier_keys, self._blocks))
        for tier_key, block in zip(*(column.tolist() for column in others), strict=True):
            tables.generations[tier_key][block] = generations[tier_key][block]
            tables.publications[0].published[block] = published[block]
        return allocated

    allocations.NewBlocks.allocate = allocate  # type: ignore[method-assign]


def saved_blocks_cleared_first() -> None:
    """What a transfer saves of another tenant's block is cleared before."""
    to_clear = last_tenants.LastTenants.to_clear

    def early(self: Any, *args: Any) -> Any:
        before, after = to_clear(self, *args)
        return before | after, {}

    last_tenants.LastTenants.to_clear = early  # type: ignore[method-assign]


def copies_are_the_copying_tenants() -> None:
    """A block counts as the tenant's whose plan allocated it, whatever was copied to it."""
    take_over = last_tenants.LastTenants.take_over
    nothing = transfers.Transfers.read({}, plan_pb2.Transfers())
    last_tenants.LastTenants.take_over = (  # type: ignore[method-assign]
        lambda self, tenant, allocated, _: take_over(self, tenant, allocated, nothing)
    )


def ref_counts_not_kept() -> None:
    """References of dropped tables stay counted."""

    add = table_changes._Counts.add

    def add_only(self: Any, table: Any, num: int = 1) -> None:
        if num > 0:
            add(self, table, num)

    table_changes._Counts.add = add_only  # type: ignore[method-assign]


def publication_survives_allocation() -> None:
    def allocate(self: Any, tier: pb.Tier, blocks: Any, generations: Any) -> None:
        published = self.publications.published.copy()
        _allocate(self, tier, blocks, generations)
        self.publications.published[:] = published

    block_tables.BlockTables.allocate = allocate  # type: ignore[method-assign]


def clearing_skipped() -> None:
    """The next tenant gets blocks as the last one left them."""
    executor.ShardKernels.clear = _nothing  # type: ignore[method-assign]


def clearing_of_one_tier_only() -> None:
    to_clear = last_tenants.LastTenants.to_clear

    def of_device(self: Any, *args: Any) -> Any:
        before, after = to_clear(self, *args)
        return {tier: blocks for tier, blocks in before.items() if tier == pb.TIER_DEVICE}, after

    last_tenants.LastTenants.to_clear = of_device  # type: ignore[method-assign]


def blocks_read_before_they_are_filled() -> None:
    """A block that a transfer fills is not cleared, though another reads it before."""
    to_clear = last_tenants.LastTenants.to_clear

    def of_others(self: Any, tenant: str, allocated: Any, moved: Any) -> Any:
        before, after = to_clear(self, tenant, allocated, moved)
        ends = moved.destinations
        unfilled = {
            tier: blocks[~np.isin(blocks, ends.blocks[ends.tier_keys == tier])]
            for tier, blocks in before.items()
        }
        return unfilled, after

    last_tenants.LastTenants.to_clear = of_others  # type: ignore[method-assign]


def clearing_after_the_transfers() -> None:
    def transfer(self: Any, session: Any, run: Any) -> None:
        for batch in run.batches:
            self._compute.transfer(batch)
        run.num_batches_queued = len(run.batches)
        for clear in run.to_clear:
            self._compute.clear(clear)
        run.cleared = run.transferred = True
        self._tenants.take_over(session.tenant, run.allocated, run.transfers)

    plan_runner.PlanRunner._transfer = transfer  # type: ignore[method-assign]


def tenant_taken_over_early() -> None:
    """A block counts as the new tenant's before it was cleared."""
    to_clear = last_tenants.LastTenants.to_clear

    def hasty(self: Any, tenant: str, allocated: Any, transfers: Any) -> Any:
        found = to_clear(self, tenant, allocated, transfers)
        self.take_over(tenant, allocated, transfers)
        return found

    last_tenants.LastTenants.to_clear = hasty  # type: ignore[method-assign]


def what_was_left_behind_is_read() -> None:
    """Every slot of a session's blocks counts as written."""

    def of_table(self: Any, part: Any, _first: int, _num: int) -> Any:
        return np.full(len(part.blocks), self._tables.block_size_tokens)

    written_slots.WrittenSlots.of_table = of_table  # type: ignore[method-assign]


def written_slots_outlive_their_generation() -> None:
    """Who gets a block may read what its last owner wrote."""

    def allocate(self: Any, place: Any, blocks: Any, generations: Any) -> None:
        before = self.num_written[place].copy()
        _allocate(self, place, blocks, generations)
        self.num_written[place][:] = before

    block_tables.BlockTables.allocate = allocate  # type: ignore[method-assign]


def a_receipt_counts_what_was_taken_as_written() -> None:
    """A plan that has run counts its blocks as written, whoever has them by then."""

    def add(self: Any, written: Any) -> None:
        for each in written:
            self._tables.num_written[each.tier_key][each.blocks] = each.num_slots

    written_slots.WrittenSlots.add = add  # type: ignore[method-assign]


def spans_past_their_tables() -> None:
    """A span that ends after its table is computed as far as the table goes."""
    rows = attention_batch.span_rows

    def cut(first: Any, counts: Any, trimmed: Any, tables: Any, size: int, *most: int) -> Any:
        num_slots = np.array([len(table) * size for table in tables], np.int64)
        return rows(first, np.minimum(counts, num_slots - first), trimmed, tables, size, *most)

    attention_batch.span_rows = cut


def refused_plans_not_undone() -> None:
    block_tables.BlockTables._undo = _nothing  # type: ignore[method-assign]


TABLE_MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        generation_unchecked,
        spans_past_their_tables,
        stale_references_unchecked,
        stale_entries_readable,
        finished_plans_attend_for_ever,
        truncation_keeps_one_too_many,
        kept_tables_are_counted_whole,
        all_that_is_kept_is_counted,
        tables_are_kept_twice,
        tables_are_kept_of_plans_that_never_ran,
        trimmed_entries_readable,
        trimmed_entries_attended,
        allocations_keep_their_generation,
        saved_blocks_cleared_first,
        copies_are_the_copying_tenants,
        ref_counts_not_kept,
        publication_survives_allocation,
        clearing_skipped,
        clearing_of_one_tier_only,
        blocks_read_before_they_are_filled,
        clearing_after_the_transfers,
        tenant_taken_over_early,
        what_was_left_behind_is_read,
        written_slots_outlive_their_generation,
        a_receipt_counts_what_was_taken_as_written,
        refused_plans_not_undone,
    )
}
