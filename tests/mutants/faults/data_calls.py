"""The tests of the data plane's calls notice a planted fault."""

from __future__ import annotations

from tests.mutants.fault import Fault

CALLS = "tests/rpc/test_data_service.py"
LOCAL = "tests/rpc/test_local_executions.py"
STREAM = "data_plane/server/execute_stream.py"
SERVICE = "data_plane/server/service.py"
BLOCKS = "data_plane/server/block_service.py"
FILES = "tests/rpc/test_file_tier.py"
PLANS = "data_plane/execution/plan_runner.py"

FAULTS = (
    *(
        Fault(
            f"a_call_that_only_writes_takes_{field}",
            SERVICE,
            'fields = ("query", "options", "output")',
            f'fields = {{"query", "options", "output"}} - {{"{field}"}}',
            CALLS,
            f"other_half and {field}",
        )
        for field in ("query", "options", "output")
    ),
    Fault(
        "a_call_that_only_attends_takes_a_key",
        SERVICE,
        '("key", "value")',
        '("value",)',
        CALLS,
        "other_half and PagedAttention-key",
    ),
    Fault(
        "a_layer_of_a_stream_brings_its_plan",
        STREAM,
        'refuse_fields(request, ["grant", "plan"], why, "layer.")',
        'refuse_fields(request, ["grant"], why, "layer.")',
        CALLS,
        "stays_open",
    ),
    Fault(
        "a_plan_of_a_stream_brings_its_grant",
        STREAM,
        'refuse_fields(request, ["grant"], "the stream was opened with a grant", "plan.")',
        "pass",
        CALLS,
        "stays_open",
    ),
    *(
        Fault(
            f"a_layer_that_was_not_written_is_attended, {only}",
            PLANS,
            'run.progress.is_written(index),\n                f"layer',
            'True,\n                f"layer',
            tests,
            only,
        )
        for tests, only in (
            (CALLS, "unary_calls_alone"),
            (CALLS, "in_one_that_was_written"),
            (LOCAL, "attends_in_the_region"),
        )
    ),
    Fault(
        "a_count_of_files_writes_them",
        BLOCKS,
        "return pb.LoadFileBlocksResponse(num_blocks=num_blocks)",
        "request.sequence_id = 9\n"
        "            return await files.load(session_id, 1, request, Lane(payer(), session_id))",
        FILES,
        "without_a_plan",
    ),
    Fault(
        "a_count_of_files_takes_a_sequence",
        BLOCKS,
        'if not request.HasField("plan") and request.sequence_id:',
        "if False:",
        FILES,
        "without_a_plan",
    ),
    Fault(
        "an_answer_has_the_entries_from_the_first_on",
        "data_plane/plans/tables/block_tables.py",
        "return Table(self.tier_key, self.blocks[entries], self.generations[entries])",
        "return self.part(int(entries[0]), int(entries[0]) + len(entries))",
        CALLS,
        "any_entries",
    ),
    Fault(
        "slots_are_counted_from_the_first_entry_on",
        "data_plane/plans/contents/written_slots.py",
        "begins = entries * block_size",
        "begins = (entries[0] + np.arange(len(counts))) * block_size",
        "tests/unit/executor/test_written_slots.py",
        "in_any_order",
    ),
    *(
        Fault(
            f"what_is_for_later_is_passed_over, {fields}",
            BLOCKS,
            f"refuse_fields(request, {fields}, _LATER)",
            "pass",
            CALLS,
            "refused_by_name",
        )
        for fields in ('("pin_grant", "output", "keys")', '("num_bytes", "keys")')
    ),
    Fault(
        "blocks_of_two_sequences_are_written_to_one",
        BLOCKS,
        "if len(others):",
        "if False:",
        CALLS,
        "refused_by_name",
    ),
    Fault(
        "a_single_call_is_of_any_plan",
        STREAM,
        "number or started.plan_number",
        "started.plan_number",
        CALLS,
        "its_plan_and_its_pass",
    ),
    Fault(
        "entries_of_a_write_have_gaps",
        BLOCKS,
        "if len(apart):",
        "if False:",
        CALLS,
        "refused_by_name",
    ),
)
