"""Faults of pools that are divided among shards."""

from __future__ import annotations

from tests.mutants.fault import Fault

SILENT_SHARDS = "control_plane/sessions/silent_shards.py"
POOL, SHARDS = "control_plane/pools/pool.py", "control_plane/pools/shards.py"
SILENT, OF_SHARDS = (f"tests/unit/registration/test_{n}.py" for n in ("silent_shards", "shards"))
SAME_BITS = (
    "tests/rpc/test_sharded_execution.py"
    "::test_attention_has_the_same_bits_however_the_pool_is_divided"
)

FAULTS = (
    Fault(  # A plan that nobody has receipted yet counts as one that a shard has not.
        "long_plans_are_lost",
        SILENT_SHARDS,
        "if oldest is None or oldest > max(session.receipted):",
        "if oldest is None:",
        f"{SILENT}::test_a_plan_that_no_shard_has_receipted_is_only_long",
    ),
    Fault(  # What a session says of a shard is believed, for all others too.
        "one_session_ends_all",
        SILENT_SHARDS,
        "return [session for session in sessions if _is_late(session, pool.now_s - timeout_s)]",
        "is_late = any(_is_late(session, pool.now_s - timeout_s) for session in sessions)\n"
        "    return list(sessions) if is_late else []",
        f"{SILENT}::test_a_missing_receipt_ends_its_session_alone",
    ),
    Fault(  # A shard that does not fence a closed session counts as silent.
        "closed_sessions_accuse_shards",
        "control_plane/sessions/sessions.py",
        "lacks_receipt=reason is MissingReceiptError",
        "lacks_receipt=True",
        f"{SILENT}::test_a_session_that_closes_slowly_harms_nobody",
    ),
    Fault(
        "silent_shards_are_waited_for",
        POOL,
        "if ended.lacks_receipt and ended.ended_s <= last_s",
        "if False",
        f"{SILENT}::test_a_shard_that_does_not_fence_such_a_session_either_ends_all",
    ),
    Fault(  # A pool is ready although nobody computes some of its query heads.
        "copies_may_lack_the_first",
        SHARDS,
        "        if len(self.states) < self.num_shards:\n            return False\n",
        "        return len(self.states) == self.num_shards\n",
        f"{OF_SHARDS}::test_copies_of_a_part_do_not_overlap_and_are_numbered_without_gaps",
    ),
    Fault(  # Every copy of a KV head computes all its query heads.
        "copies_compute_the_same_heads",
        "kvplane/shard.py",
        "if self.num_copies == 1:  # all of neighbouring KV heads",
        "if True:",
        SAME_BITS,
    ),
    Fault(  # Shards' outputs are put one after another, tokens and heads.
        "outputs_joined_as_they_come",
        "kvplane/tensor.py",
        '    data = b"".join(\n        view[token * token_bytes',
        '    data = b"".join(bytes(tensor.data) for tensor, _ in parts) or b"".join(\n'
        "        view[token * token_bytes",
        SAME_BITS,
    ),
    Fault(  # Every shard attends with the slopes and sinks of the first.
        "options_of_the_first_heads",
        "kvplane/attention_options.py",
        "        slopes = tuple(x for each in heads for x in",
        "        heads = [range(sum(len(each) for each in heads))]\n"
        "        slopes = tuple(x for each in heads for x in",
        SAME_BITS,
    ),
    Fault(  # Each rank adds the bias of a layer whose outputs are summed.
        "biases_added_by_all",
        "engine/parallel/model_part.py",
        "if group.rank > 0:",
        "if False:",
        "tests/models/test_model_parts.py::test_the_parts_compute_what_the_whole_does[starcoder2]",
    ),
)
