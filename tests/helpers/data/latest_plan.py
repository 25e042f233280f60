"""What a layer names that is on time."""

from __future__ import annotations

from typing import Any

from data_plane import Executor


def of_latest(executor: Executor, session_id: int = 1) -> dict[str, Any]:
    """Return the session's latest plan and its present pass, as keyword arguments of a layer; those
    of plan 1 before there is a plan.
    """
    session = executor._sessions._open.get(session_id)
    run = None if session is None else session.latest
    if run is None:
        return {"plan_number": 1}
    return {"plan_number": run.number, "pass_index": run.pass_index}
