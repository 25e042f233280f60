"""Faults in how messages are read, and operations that one of the tables lacks."""

from __future__ import annotations

from tests.mutants.fault import Fault

TWIN, TESTS = "kvplane/wire/twin.py", "tests/unit/client/test_twin.py"
TABLE = "tests/rpc/operations/test_operations_table.py"
COMPLETE = f"{TABLE}::test_no_table_lacks_an_operation"

FAULTS = (
    *(  # A reader takes what the twin alone can read.
        Fault(
            f"an_encoding_is_not_read_again, {encoding}",
            TWIN,
            "if message.SerializeToString() == data:",
            "if True:",
            f"{TESTS}::test_every_encoding_of_a_message_is_read_whole[{encoding}]",
        )
        for encoding in ("unpacked", "chunks")
    ),
    Fault(
        "an_encoding_is_known_by_its_length",
        TWIN,
        "if message.SerializeToString() == data:",
        "if message.ByteSize() == len(data):",
        f"{TESTS}::test_a_loss_is_found_where_a_number_grows_by_as_much",
    ),
    Fault(
        "unknown_fields_are_dropped",
        TWIN,
        "if unknown is not None:",
        "if False:",
        f"{TESTS}::test_an_unknown_field_is_named",
    ),
    Fault(
        "an_operation_has_no_class",
        "control_plane/steps/operations.py",
        "        Truncate(),\n",
        "",
        COMPLETE,
    ),
    Fault(
        "an_operation_has_no_builder",
        TABLE,
        "def test_no_table_lacks_an_operation() -> None:\n",
        "del ops.truncate\n\n\ndef test_no_table_lacks_an_operation() -> None:\n",
        COMPLETE,
    ),
    Fault("an_operation_has_no_row", TABLE, '    "truncate": Row(', '    "cut": Row(', COMPLETE),
)
