"""The kernels' tests fail when a fault is planted in the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.warm_pytest import assert_noticed

PLUGIN = Path(__file__).parent / "kernels" / "kernel_mutants.py"

ATTENTION = "test_paged_attention.py"
OPTIONS = "test_attention_options.py"
INVARIANCE = "test_paged_attention_invariance.py"
CACHING = "test_reshape_and_cache.py"
COPIES = "test_block_copies.py"
FP8_ATTENTION = "test_fp8_attention.py"
FP8_CONVERSIONS = "test_fp8_conversions.py"

# Fault: the file of tests that must notice it.
FAULTS = {
    "newest_slot_not_written": ATTENTION,
    "rows_see_one_token_less": ATTENTION,
    "values_of_the_next_head": ATTENTION,
    "attention_returns_zeros": ATTENTION,
    "two_blocks_swapped": ATTENTION,
    "table_shifted_by_one": ATTENTION,
    "keys_and_values_exchanged": ATTENTION,
    "values_at_the_end_of_latents": "test_latents.py",
    "groups_interleaved": ATTENTION,
    "window_one_token_wider": ATTENTION,
    "alibi_dropped": ATTENTION,
    "soft_cap_dropped": OPTIONS,
    "sinks_of_the_next_head": OPTIONS,
    "lse_in_base_two": ATTENTION,
    "pages_rounded_to_bf16": ATTENTION,
    "bits_depend_on_the_batch": INVARIANCE,
    "bits_depend_on_the_threads": INVARIANCE,
    "bad_table_entries_taken_as_zero": "test_kernels_bad_input.py",
    "negative_slots_written": CACHING,
    "keys_cut_off_instead_of_rounded": CACHING,
    "copies_read_the_pool_as_it_was": COPIES,
    "swaps_the_other_way_round": COPIES,
    "gathers_in_order_of_ids": COPIES,
    "key_scales_forgotten": FP8_ATTENTION,
    "value_scales_forgotten": FP8_ATTENTION,
    "scales_of_the_next_head": FP8_ATTENTION,
    "scales_of_keys_and_values_exchanged": FP8_ATTENTION,
    "fp8_cut_off_instead_of_rounded": FP8_CONVERSIONS,
    "fp8_not_saturated": FP8_CONVERSIONS,
    "fp8_subnormals_become_zero": FP8_CONVERSIONS,
    "fp8_nan_becomes_zero": FP8_CONVERSIONS,
    "keys_times_the_inverse_of_their_scales": FP8_CONVERSIONS,
}


@pytest.mark.parametrize("mutant", FAULTS)
def test_a_planted_fault_is_noticed(mutant: str) -> None:
    assert_noticed(PLUGIN, mutant, f"tests/kernels/{FAULTS[mutant]}")
