"""What the command prints in a narrow terminal."""

from __future__ import annotations

import io

from rich.console import Console

from kvplane.cli.values import table_of


def test_no_part_of_a_sessions_id_is_left_out_where_a_table_is_narrow() -> None:
    row = {"pool": "default", "session": "502828640514462", "plans_in_flight": 0, "held_blocks": 0}
    out = io.StringIO()
    Console(file=out, width=30).print(table_of([row]))
    assert "…" not in out.getvalue()
