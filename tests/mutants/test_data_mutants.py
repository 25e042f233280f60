"""The data plane's tests fail when a fault is planted in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.warm_pytest import assert_noticed

PLUGIN = Path(__file__).parent / "data" / "data_mutants.py"

EXECUTOR = "executor/test_executor.py"
SESSIONS = "executor/test_executor_sessions.py"
REJECTIONS = "executor/test_executor_rejections.py"
INVARIANTS = "executor/test_invariants_data.py"
STREAMS = "executor/test_streams.py"
FAILURES = "executor/test_device_failures.py"
LAYOUT = "client/test_layout.py"
SCALES = "data_kernels/test_kv_scales.py"
CLEARED = "executor/test_cleared_blocks.py"
ENDED = "plans/test_ended_sessions.py"
TENANTS = "plans/test_last_tenants.py"
PROGRESS = "plans/test_progress.py"
TRANSFERS = "plans/test_transfers.py"
TRIMMED = "executor/test_trimmed_tables.py"
TAKEN = "executor/test_taken_blocks.py"
PUBLICATIONS = "plans/test_publications.py"
LATENTS = "executor/test_latent_pools.py"
KEPT = "executor/test_kept_blocks.py"
BOUND = "data_kernels/test_bound_layers.py"
WRITTEN = "executor/test_written_slots.py"
BATCH = "plans/test_attention_batch.py"
TABLES = "plans/test_table_changes.py"
ORDER = "plans/test_plan_order.py"
LAYERS = "executor/test_layer_runner.py"

# Fault: the file of tests that must notice it.
FAULTS = {
    "verification_skipped": REJECTIONS,
    "generation_unchecked": INVARIANTS,
    "published_write_allowed": INVARIANTS,
    "receipt_given_early": INVARIANTS,
    "clearing_skipped": CLEARED,
    "version_unchecked": REJECTIONS,
    "fenced_ordinals_forgotten": SESSIONS,
    "transfers_run_twice": EXECUTOR,
    "stale_entries_readable": TAKEN,
    "trimmed_entries_readable": TRIMMED,
    "truncation_keeps_one_too_many": TRIMMED,
    "kept_tables_are_counted_whole": TABLES,
    "tables_are_kept_of_plans_that_never_ran": ORDER,
    "allocations_keep_their_generation": KEPT,
    "withdrawals_ignored": PUBLICATIONS,
    "receipts_before_the_end": STREAMS,
    "what_was_left_behind_is_read": WRITTEN,
    "skip-newest-slot": EXECUTOR,
    "signatures_ignored": BOUND,
    "batches_kept": BOUND,
    "tokens_of_bound_keys_uncounted": BOUND,
    "options_of_bound_layers_ignored": LAYERS,
    "rows_of_bound_layers_ignored": LAYERS,
    "spans_past_their_tables": BATCH,
    "tables_are_kept_twice": TABLES,
    "all_that_is_kept_is_counted": TABLES,
    "zero-attention": EXECUTOR,
    "swap-two-blocks": EXECUTOR,
    "shift-table": EXECUTOR,
    "epoch_unchecked": INVARIANTS,
    "publication_forgotten_at_the_kernel": REJECTIONS,
    "publication_survives_allocation": INVARIANTS,
    "stale_publications_kept": SESSIONS,
    "withdrawals_of_any_generation": PUBLICATIONS,
    "stale_references_unchecked": REJECTIONS,
    "ref_counts_not_kept": CLEARED,
    "unknown_fields_ignored": REJECTIONS,
    "finished_plans_attend_for_ever": TAKEN,
    "trimmed_entries_attended": TRIMMED,
    "saved_blocks_cleared_first": KEPT,
    "copies_are_the_copying_tenants": KEPT,
    "clearing_of_one_tier_only": CLEARED,
    "blocks_read_before_they_are_filled": TENANTS,
    "clearing_after_the_transfers": STREAMS,
    "tenant_taken_over_early": FAILURES,
    "spans_written_shrink": PROGRESS,
    "gaps_in_blocks_allowed": EXECUTOR,
    "layers_written_again_after_the_end": EXECUTOR,
    "refused_plans_not_undone": REJECTIONS,
    "receipted_plan_writes_again": INVARIANTS,
    "order_unchecked": INVARIANTS,
    "ended_ranges_grow_together": ENDED,
    "ended_sessions_forgotten_under_the_same_key": SESSIONS,
    "ended_sessions_forgotten_under_another_key": SESSIONS,
    "transfers_by_direction": TRANSFERS,
    "transfers_skipped": EXECUTOR,
    "compute_ahead_of_swaps": STREAMS,
    "swaps_ahead_of_compute": STREAMS,
    "threads_in_no_order": STREAMS,
    "host_reads_early": STREAMS,
    "fences_before_the_end": STREAMS,
    "voided_plans_not_waited_for": STREAMS,
    "failures_forgotten": STREAMS,
    "layers_before_transfers": FAILURES,
    "pools_go_early": FAILURES,
    "receipts_before_kept_ones": FAILURES,
    "late_attention_not_waited_for": FAILURES,
    "scales_of_the_wrong_heads": SCALES,
    "fingerprint_without_scales": LAYOUT,
    "latents_read_as_keys_and_values": LAYOUT,
    "latents_without_their_values_scale": LATENTS,
    "latents_counted_twice": LATENTS,
    "written_slots_outlive_their_generation": WRITTEN,
    "a_receipt_counts_what_was_taken_as_written": WRITTEN,
}


@pytest.mark.parametrize("mutant", FAULTS)
def test_a_fault_planted_in_the_data_plane_is_noticed(mutant: str) -> None:
    assert_noticed(PLUGIN, mutant, f"tests/unit/{FAULTS[mutant]}")
