"""An operation that one of the tables lacks is noticed."""

from __future__ import annotations

import pytest

from control_plane.steps.operations import OPERATIONS
from kvplane import ops
from tests.helpers.patched_faults import load

TABLE = load("rpc/operations/test_operations_table.py")


@pytest.mark.parametrize("where", ["class", "builder", "row"])
def test_an_operation_that_is_forgotten_is_noticed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "class":
        monkeypatch.delitem(OPERATIONS, "truncate")
    elif where == "builder":
        monkeypatch.delattr(ops, "truncate")
    else:
        monkeypatch.delitem(TABLE.ROWS, "truncate")
    with pytest.raises((AssertionError, AttributeError)):
        TABLE.test_no_table_lacks_an_operation()
