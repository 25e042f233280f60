"""Faults in the tables of a data plane, in what plans allocate and in what is cleared of it."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

CHANGES = "data_plane/plans/tables/table_changes.py"
BLOCK_TABLES = "data_plane/plans/tables/block_tables.py"
ALLOCATIONS = "data_plane/plans/tables/allocations.py"
TENANTS = "data_plane/plans/contents/last_tenants.py"
SLOTS = "data_plane/plans/contents/written_slots.py"
RUNNER = "data_plane/execution/plan_runner.py"
SHARD_KERNELS = "data_plane/execution/shards/shard_kernels.py"

INVARIANTS, TAKEN, TRIMMED, KEPT, CLEARED, WRITTEN, REJECTIONS, STREAMS, FAILURES = (
    f"tests/unit/executor/test_{name}.py"
    for name in (
        *("invariants_data", "taken_blocks", "trimmed_tables", "kept_blocks", "cleared_blocks"),
        *("written_slots", "executor_rejections", "streams", "device_failures"),
    )
)
TABLES, ORDER, LAST_TENANTS, BATCH = (
    f"tests/unit/plans/test_{name}.py"
    for name in ("table_changes", "plan_order", "last_tenants", "attention_batch")
)
ROWS = "    rows = span_rows(first, counts, "
BEFORE, AFTER = "(before, ~saved & (~filled | read))", "(after, saved & ~filled)"
CLEARS = """\
        if not run.cleared:
            self._compute.clear(before)
            run.cleared = True
"""
TO_CLEAR = "self._tenants.to_clear(session.tenant, allocated, transfers)"

FAULTS = (
    Fault(
        "generation_unchecked",
        CHANGES,
        "    _check_generations(tables, changes, allocated)\n",
        "",
        "tests/unit/plans/test_table_changes.py",
    ),
    Fault(  # A table may go on referring to a block that its session allocates for another.
        "stale_references_unchecked",
        CHANGES,
        "    _check_own_tables(tables, session_id, new, allocated)\n",
        "",
        TABLES,
    ),
    Fault(  # A sequence whose blocks were given to another session is read as before.
        "stale_entries_readable",
        BLOCK_TABLES,
        *first("    def first_stale(self, tables: Sequence[Table]) -> int | None:", "return None"),
        TAKEN,
    ),
    Fault(  # Only when a plan starts is it checked that its tables are not stale.
        "finished_plans_attend_for_ever",
        "data_plane/plans/write_checks.py",
        "        if run.checked_taken != self._tables.num_taken:\n",
        "        if False:\n",
        TAKEN,
    ),
    Fault(
        "truncation_keeps_one_too_many",
        CHANGES,
        "        if kind == TRUNCATE:\n",
        "        if kind == TRUNCATE and num_blocks < length:\n            num_blocks += 1\n"
        "        if kind == TRUNCATE:\n",
        TRIMMED,
    ),
    Fault(  # What a plan leaves of a table counts as before, with what is cut off.
        "kept_tables_are_counted_whole",
        CHANGES,
        "        self._counts.add(before.part(num_blocks, len(before.blocks)), -1)\n",
        "",
        TABLES,
    ),
    Fault(  # What is kept is taken away and added, however long.
        "all_that_is_kept_is_counted",
        CHANGES,
        "        self._counts.add(before)\n"
        "        self._counts.add(before.part(num_blocks, len(before.blocks)), -1)\n",
        "        self._counts.add(made)\n",
        TABLES,
    ),
    Fault(
        "tables_are_kept_twice",
        CHANGES,
        "self._before.pop((group, sequence_id), None)  # once",
        "self._before.get((group, sequence_id))",
        TABLES,
    ),
    Fault(
        "tables_are_kept_of_plans_that_never_ran",
        "data_plane/plans/sessions.py",
        "if plan.finished > self.finished:",
        "if False:",
        ORDER,
    ),
    Fault(  # A trimmed table counts as one that begins with block 0.
        "trimmed_entries_readable",
        CHANGES,
        "return Table(old.tier_key, blocks, generations, num_blocks)",
        "return Table(old.tier_key, blocks, generations, 0)",
        TRIMMED,
    ),
    Fault(  # Any window may be asked for, whatever was trimmed.
        "trimmed_entries_attended",
        SHARD_KERNELS,
        *first("def check_window(window_tokens: int, most: int | None) -> None:", "return"),
        TRIMMED,
    ),
    Fault(  # Blocks for no table keep generation and publication.
        "allocations_keep_their_generation",
        ALLOCATIONS,
        "        allocated: AllocatedBlocks = {}\n",
        "        allocated: AllocatedBlocks = {}\n"
        "        generations = {key: g.copy() for key, g in tables.generations.items()}\n"
        "        published = tables.publications[0].published.copy()\n",
        KEPT,
        also=(
            (
                ALLOCATIONS,
                "        return allocated\n",
                "        num = len(self._entries)\n"
                "        keys, blocks = self._tier_keys[num:], self._blocks[num:]\n"
                "        for key, block in zip(keys.tolist(), blocks.tolist(), strict=True):\n"
                "            tables.generations[key][block] = generations[key][block]\n"
                "            tables.publications[0].published[block] = published[block]\n"
                "        return allocated\n",
            ),
        ),
    ),
    Fault(  # What a transfer saves of another tenant's block is cleared before.
        "saved_blocks_cleared_first",
        TENANTS,
        f"({BEFORE}, {AFTER}):",
        "((before, ~filled | ~saved & read),):",
        KEPT,
    ),
    Fault(  # A block counts as the tenant's whose plan allocated it, whatever was copied to it.
        "copies_are_the_copying_tenants",
        TENANTS,
        "        if not len(transfers):\n",
        "        if True:\n",
        LAST_TENANTS,
    ),
    Fault(  # References of dropped tables stay counted.
        "ref_counts_not_kept",
        CHANGES,
        "self._of_tier[table.tier_key][table] += num",
        "self._of_tier[table.tier_key][table] += max(num, 0)",
        TABLES,
    ),
    Fault(
        "publication_survives_allocation",
        BLOCK_TABLES,
        "self._set(self.publications[group_of(tier_key)].published, blocks, False)",
        "pass",
        INVARIANTS,
    ),
    Fault(  # The next tenant gets blocks as the last one left them.
        "clearing_skipped",
        SHARD_KERNELS,
        *first("    def clear(self, blocks: BlocksByTier) -> None:", "return"),
        CLEARED,
    ),
    Fault(
        "clearing_of_one_tier_only",
        SHARD_KERNELS,
        "self._host_kernels.clear_blocks(self._pools.tier(tier_key), ids)",
        "pass",
        CLEARED,
    ),
    Fault(  # A block that a transfer fills is not cleared, though another reads it before.
        "blocks_read_before_they_are_filled",
        TENANTS,
        BEFORE,
        "(before, ~saved & ~filled)",
        LAST_TENANTS,
    ),
    Fault(
        "clearing_after_the_transfers",
        RUNNER,
        CLEARS,
        "",
        STREAMS,
        also=(
            (
                RUNNER,
                "        self._compute.clear(after)\n",
                f"{CLEARS}        self._compute.clear(after)\n",
            ),
        ),
    ),
    Fault(  # A block counts as the new tenant's before it was cleared.
        "tenant_taken_over_early",
        RUNNER,
        TO_CLEAR,
        f"({TO_CLEAR}, self._tenants.take_over(session.tenant, allocated, transfers))[0]",
        FAILURES,
    ),
    Fault(  # Every slot of a session's blocks counts as written.
        "what_was_left_behind_is_read",
        SLOTS,
        "return np.maximum(counts, np.clip(num_tokens - begins, 0, block_size))",
        "return np.full(len(part.blocks), block_size)",
        WRITTEN,
    ),
    Fault(  # Who gets a block may read what its last owner wrote.
        "written_slots_outlive_their_generation",
        BLOCK_TABLES,
        "        self._set(self.num_written[tier_key], blocks, 0)\n",
        "",
        WRITTEN,
    ),
    Fault(  # A plan that has run counts its blocks as written, whoever has them by then.
        "a_receipt_counts_what_was_taken_as_written",
        SLOTS,
        "            note_written(\n"
        "                *(tables.num_written[tier_key], tables.generations[tier_key]),\n"
        "                *(each.blocks, each.num_slots, each.generations),\n"
        "            )\n",
        "            tables.num_written[tier_key][each.blocks] = each.num_slots\n",
        WRITTEN,
    ),
    Fault(  # A span that ends after its table is computed as far as the table goes.
        "spans_past_their_tables",
        "data_plane/plans/batches/attention_batch.py",
        ROWS,
        "    ends = np.array([len(table) * size for table in blocks], np.int64)\n"
        "    rows = span_rows(first, np.minimum(counts, ends - first), ",
        BATCH,
    ),
    Fault(
        "refused_plans_not_undone",
        BLOCK_TABLES,
        *first("    def _undo(self, before: _Before) -> None:", "return"),
        REJECTIONS,
    ),
)
