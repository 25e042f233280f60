"""Faults to plant in the native core: what is replaced, and by what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old`` is exactly once in ``file`` (of csrc/blocks)."""

    file: str
    old: str
    new: str


# Each of these is found by the tests of one pool.
FAULTS = {
    "a_fork_is_a_family_of_its_own": Mutant(
        "steps/sequences.cpp",
        "  join_family(session, index, parent.family);\n",
        "  join_family(session, index, ++session.last_family);\n",
    ),
    "an_abort_does_not_tell_where_families_are": Mutant(
        "steps/abort.cpp",
        "  claim_device(session, index, sequences_[index].tier == kDevice);\n",
        "",
    ),
    "what_was_told_of_a_family_is_told_again": Mutant(
        "steps/families.cpp",
        "family.num_on_device && told != Family::Told::kOnDevice",
        "family.num_on_device",
    ),
    "each_admission_looks_at_the_whole_pool": Mutant(
        "memory/block_store.cpp",
        "void BlockStore::share(const Block* blocks, size_t num) {\n",
        "void BlockStore::share(const Block* blocks, size_t num) {\n"
        "  for (Block b = 0; b < num_blocks; ++b)\n"
        "    if (infos_[b].state == State::kHeld) settle(b); else touched(1);\n",
    ),
    "what_is_forgotten_waits_for_a_release": Mutant(
        "index/forget.cpp", "  entry.producer = kNoEntry;\n", ""
    ),
    "detached_without_its_hash": Mutant(
        "index/prefix_index.cpp", "hash(top);  // while its parent is known", ""
    ),
    "hash_of_the_tokens_alone": Mutant(
        "index/prefix_index.cpp",
        "chained_hash(hashes_[parent], tokens_.row(child),",
        "chained_hash(Hash{}, tokens_.row(child),",
    ),
    "published_before_it_is_written": Mutant(
        "index/publish.cpp",
        "std::min(sequence.num_written, sequence.tokens.size) / block_size_,",
        "std::min(sequence.num_scheduled, sequence.tokens.size) / block_size_,",
    ),
    "reused_before_it_is_quiet": Mutant(
        "steps/tables.cpp",
        "if (plan <= session.done) return",
        "if (plan <= session.done + 1) return",
    ),
    "found_where_another_session_computes_it": Mutant(
        "steps/admit.cpp", "|| producer.handle != session.handle ||", "||"
    ),
    "announced_while_a_large_prefix_is_taken_apart": Mutant(
        "index/findable.h", "if (!answers_.size()) return true;", "return true;"
    ),
    "all_that_can_be_found_is_walked_at_once": Mutant(
        "index/findable.h", "if (way_.size() == most_) return std::nullopt;", ""
    ),
    "roots_that_no_block_names_are_kept": Mutant(
        "recovery/rebuild.cpp", "  if (roots_.size() >= prune_at_) prune_roots();\n", ""
    ),
    "a_receipt_that_is_taken_in_chunks_forgets_some": Mutant(
        "index/publish.cpp",
        "const auto& [index, uid] = touched[next_touched++];",
        "const auto& [index, uid] = touched[next_touched++];\n"
        "      if (max_blocks == 2 && num == 1) continue;",
    ),
    "an_abort_in_chunks_leaves_one_out": Mutant(
        "steps/abort.cpp",
        "    if (left <= 0) return true;\n    const int64_t id",
        "    if (left <= 0) return ++aborting.next_id, true;\n    const int64_t id",
    ),
    "an_abort_in_chunks_notes_no_copies": Mutant(
        "steps/abort.cpp",
        "      if (left <= 0) return true;\n      origins.add(",
        "      if (left <= 0) return next_plan = session.plans.size(), true;\n      origins.add(",
    ),
    "an_abort_in_chunks_forgets_pins": Mutant(
        "steps/abort.cpp",
        "      if (left <= 0) return true;\n      const Transfer&",
        "      if (left <= 0) return record.transfers.pop_back(), true;\n      const Transfer&",
    ),
    "receipts_in_chunks_release_nothing_more": Mutant(
        "index/publish.cpp",
        "      if (!blocks.empty()) return true;",
        "      if (!blocks.empty()) return session.releases.pop_front(), true;",
    ),
    "receipts_in_chunks_forget_pins": Mutant(
        "index/publish.cpp",
        "      if (left <= 0) return true;\n      const Transfer&",
        "      if (left <= 0) return record.transfers.pop_back(), true;\n      const Transfer&",
    ),
    "a_session_that_ends_within_a_swap_keeps_the_copies": Mutant(
        "core/pool.cpp", "  end_swap(session);\n", ""
    ),
    "a_block_of_a_shared_chunk_is_swapped_twice": Mutant(
        "steps/sequences.cpp",
        "chunk.num_owners > 1 || store(sequence.tier)",
        "store(sequence.tier)",
    ),
    "whole_tables_in_chunks_leave_a_transfer_out": Mutant(
        "steps/plans.cpp",
        "    if (num >= max_blocks) return true;\n    const Transfer&",
        "    if (num >= max_blocks) return ++next, true;\n    const Transfer&",
    ),
    "an_abort_counts_no_blocks": Mutant(
        "steps/abort.cpp",
        "return 1 + std::max(num_copies, held_before - session.num_held);",
        "return session.num_held > held_before;",
    ),
    "whole_tables_in_chunks_leave_one_out": Mutant(
        "steps/plans.cpp",
        "        max_blocks)\n      return true;",
        "        max_blocks)\n      return ++tables.next, true;",
    ),
    "what_a_plan_leaves_out_is_published": Mutant(
        "steps/sequences.cpp",
        "const bool expects = !session.resync_due && ",
        "const bool expects = ",
    ),
    "trims_in_flight_count_as_sent": Mutant(
        "steps/tables.cpp", "  note_change(session, sequence, i);\n", ""
    ),
    "new_blocks_in_flight_count_as_sent": Mutant(
        "steps/tables.cpp", "  note_change(session, sequence, table.size);\n", ""
    ),
    "forks_in_flight_count_as_sent": Mutant(
        "steps/sequences.cpp", "  note_change(session, child, 0);\n", ""
    ),
    "changes_count_as_sent_by_the_plan_before": Mutant(
        "core/session.h",
        "sequence.changed_by = session.last_plan + 1;",
        "sequence.changed_by = session.last_plan;",
    ),
    "plans_in_flight_count_as_run": Mutant(
        "core/session.h",
        "return sequence.changed_by <= session.done ?",
        "return sequence.changed_by <= session.last_plan ?",
    ),
    "an_earlier_change_in_flight_is_forgotten": Mutant(
        "core/session.h",
        "sequence.num_sent = std::min(num_sent(session, sequence), first);",
        "sequence.num_sent = first;",
    ),
    "a_plan_that_keeps_nothing_names_a_plan_that_has_run": Mutant(
        "steps/plans.cpp", "keeps ? first.done : 0,", "first.resync_due ? first.done : 0,"
    ),
    "a_resync_keeps_tables": Mutant(
        "steps/abort.cpp", "if (!keeps) note_change(", "if (false) note_change("
    ),
    "a_plan_keeps_tables_as_one_in_flight_left_them": Mutant(
        "steps/plans.cpp",
        "keeps ? first.done : 0,",
        "keeps ? first.last_plan : 0,",
    ),
    "written_in_place_though_shared": Mutant(
        "steps/append.cpp",
        "return chunk.num_owners == 1 &&\n         store(kDevice).is_writable(b, "
        "session.handle,\n                                    static_cast",
        "return store(kDevice).is_writable(b, session.handle, static_cast",
    ),
    "a_spare_does_not_take_over": Mutant(
        "index/prefix_index.cpp",
        "const Block spare = tier == kDevice ? entry.spares : kNoBlock;",
        "const Block spare = kNoBlock;",
    ),
    "a_truncated_sequence_counts_as_published": Mutant(
        "steps/sequences.cpp",
        "if (sequence.num_published > num_full) {",
        "if (sequence.num_published > num_full + 1000000) {",
    ),
    "an_aborted_copy_to_the_host_tier_is_found": Mutant(
        "steps/plans.cpp", "if (has_run && entry.block(", "if (entry.block("
    ),
    "copied_to_the_host_tier_by_a_plan_of_whole_tables": Mutant(
        "steps/plans.cpp", "if (session.resync_due || entry.block(kHost)", "if (entry.block(kHost)"
    ),
    "whole_tables_do_not_say_what_is_allocated": Mutant(
        "steps/plans.cpp",
        "changes.allocated[i] = session.allocated.erase(key);",
        "session.allocated.erase(key);",
    ),
    "copied_before_the_same_plan_computes_it": Mutant(
        "steps/append.cpp",
        "const bool copies_unwritten = sequence.filled_by == session.number &&",
        "const bool copies_unwritten = false &&",
    ),
    "swapped_before_the_same_plan_computes_it": Mutant(
        "steps/sequences.cpp",
        "std::max(sequence.computed_by, sequence.filled_by) == session.number",
        "sequence.computed_by == session.number",
    ),
    "a_sharer_writes_what_receipts_may_publish": Mutant(
        "steps/sequences.cpp",
        "if (ghost->first != kNoBlock) blocks.keep",
        "if (ghost->first != kNoBlock && blocks.state(ghost->first) == State::kRetired) "
        "blocks.keep",
    ),
    "an_abort_leaves_copies": Mutant(
        "steps/abort.cpp", "!origins.empty() &&", "false && !origins.empty() &&"
    ),
    "what_a_copy_reads_is_written": Mutant(
        "steps/plans.cpp",
        "pin(source.block, session.handle, num_tokens);",
        "pin(source.block, session.handle, 0 * num_tokens);",
    ),
    "a_sequence_is_forgotten_twice": Mutant(
        "core/pool.cpp",
        "    sequence.live = false;\n    forget_sequence(index);",
        "    sequence.live = false;\n    forget_sequence(index);\n    forget_sequence(index);",
    ),
    "tokens_are_shared_without_a_look": Mutant(
        "containers/chunks.h",
        "if (!store.has(id) || std::memcmp(store[id].items, tokens, sizeof store[id].items) != 0)",
        "if (!store.has(id))",
    ),
    "tokens_that_are_shared_are_not_counted": Mutant(
        "containers/chunks.h", "    ++store[id].num_owners;\n    chunks", "    chunks"
    ),
    "trimmed_beyond_what_an_abort_leaves": Mutant(
        "steps/append.cpp",
        "std::min(sequence.num_written, sequence.tokens.size);",
        "sequence.num_written;",
    ),
    "a_cut_frees_what_plans_in_flight_touch": Mutant(
        "steps/sequences.cpp",
        "is_open ? session.number + 1 : session.last_plan",
        "is_open ? session.number + 1 : session.done",
    ),
    "a_cut_frees_what_a_draft_allocates": Mutant(
        "steps/sequences.cpp",
        "is_open ? session.number + 1 : session.last_plan",
        "session.last_plan",
    ),
    "a_destination_is_allocated_again_by_its_plan": Mutant(
        "steps/tables.cpp", "if (there.ref_count(b) > 1 ||", "if (num > 0 ||"
    ),
    "a_check_is_of_the_last_step": Mutant(
        "bindings/steps.cpp", "const InStep step(groups, handle, number);", "(void)number;"
    ),
    "a_refused_admission_takes_its_id": Mutant(
        "steps/admit.cpp",
        "if (!copies_last || has_window)",
        "if (!copies_last)\n"
        "      groups[0]->new_sequence(groups[0]->sessions_[handle], admission.sequence_id, "
        "admitted_by);\n"
        "    if (!copies_last || has_window)",
    ),
    "the_first_of_contradictory_tokens_wins": Mutant(
        "index/publish.cpp", "sequence.last_given = static_cast<int64_t>(given.size()) - 1;", ""
    ),
    "tokens_that_nothing_computes_count_for_nothing": Mutant(
        "core/pool.cpp", "div_ceil(session.num_tokens, block_size_)", "int64_t{0}"
    ),
    "a_receipt_is_no_progress": Mutant(
        "index/publish.cpp", "    sequence.progress_s = now_s_;\n", ""
    ),
    "blocks_that_are_given_are_no_progress": Mutant(
        "steps/append.cpp",
        "    sequence.progress_s = pool.now_s_;\n    const int64_t first",
        "    const int64_t first",
    ),
    "what_is_scheduled_is_no_progress": Mutant(
        "steps/append.cpp",
        "  sequence.progress_s = now_s_;\n  sequence.pending",
        "  sequence.pending",
    ),
    "an_admission_ignores_the_quota": Mutant(
        "steps/admit.cpp", "return more <= allowed", "return more <= allowed + 1"
    ),
    "nothing_waits_for_receipts": Mutant(
        "steps/tables.cpp",
        "if (plan <= session.done) return",
        "if (plan != kEnded) return",
    ),
    "a_block_keeps_its_generation": Mutant("memory/block_store.cpp", "++info.generation;", ""),
    "evicted_together_where_a_spare_takes_a_place": Mutant(
        "memory/block_store.cpp", "index_.num_spares() ? 1 :", ""
    ),
    "spares_are_not_counted": Mutant("index/prefix_index.cpp", "  ++num_spares_;\n", ""),
    "what_is_below_is_published_before_its_parent": Mutant(
        "index/publish.cpp", "if (!has_below && device.state(b) == State::kHeld)", "if (true)"
    ),
    "added_below_what_has_siblings_without_a_key": Mutant(
        "index/prefix_index.cpp", "if (i == 0) {", "if (false) {"
    ),
    "a_pool_forgets_generations_that_its_smallest_shard_lacks": Mutant(
        "memory/block_store.cpp",
        "more_generations_.assign(generations.begin() + num_blocks, generations.end());",
        "",
    ),
    "a_pool_takes_one_shards_generations": Mutant(
        "recovery/rebuild.cpp",
        "std::max(known[b], shard.generations[t][b]);",
        "shard.generations[t][b];",
    ),
    "a_publication_of_another_generation_is_restored": Mutant(
        "recovery/rebuild.cpp",
        "row.generation != device.generation(row.block) ||",
        "",
    ),
    "all_below_a_spare_is_announced_at_once": Mutant(
        "index/publish.cpp",
        "num < max_entries && has_announcements()",
        "num < 1000 * max_entries && has_announcements()",
    ),
    "a_sibling_has_no_key": Mutant(
        "index/prefix_index.cpp",
        "for (const EntryId sibling : {above.child, e}) {",
        "for (const EntryId sibling : {e}) {",
    ),
    "receipts_free_the_next_plans_blocks": Mutant(
        "index/publish.cpp",
        "session.releases.front().plan <= session.done;",
        "session.releases.front().plan <= session.done + 1;",
    ),
}
# What only pools of several layer groups show.
GROUPED = {
    "each_group_counts_families": Mutant(
        "core/grouped_pool.h",
        "    for (size_t g = 1; g < pools_.size(); ++g) pools_[g]->count_no_families();\n",
        "",
    ),
    "a_group_waits_for_its_own_receipts_alone": Mutant(
        "steps/admit.cpp", "if (groups.size == 1) return;", "if (groups.size) return;"
    ),
    "a_hit_of_one_group_is_anothers": Mutant(
        "steps/admit.cpp", "num_agreed += num == most || groups.size == 1;", "++num_agreed;"
    ),
    "an_append_asks_one_group_alone": Mutant(
        "steps/append.cpp",
        "      if (failure.code != Code::kOk) break;\n",
        "      break;\n",
    ),
    "an_abort_begins_again_in_one_group_alone": Mutant(
        "steps/abort.cpp",
        "for (int64_t other = 0; other < groups.size;",
        "for (int64_t other = g; other <= g;",
    ),
    "an_abort_leaves_more_published_than_written": Mutant(
        "steps/abort.cpp",
        "if (has_copies || sequence.num_published * block_size_ > sequence.num_written) {",
        "if (has_copies) {",
    ),
    "a_plan_names_the_first_group_alone": Mutant(
        "steps/draft.cpp",
        "changes.groups.resize(changes.kinds.size(), group);",
        "changes.groups.resize(changes.kinds.size(), 0);",
    ),
}
