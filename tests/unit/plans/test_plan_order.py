"""Sessions of the data plane: which plan may start, and which sessions never open again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.batches.attention_batch import prepare_batch
from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.progress import Progress
from data_plane.plans.sessions import MAX_SESSION_ID, EndedSessions, RunningPlan, Session, Sessions
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.errors import (
    InvalidRequestError,
    PlanConflictError,
    PlanOutOfOrderError,
    SessionExpiredError,
)
from kvplane.wire.plane.v1 import plan_pb2 as plans
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.refusals import refused

NUM_KEPT = 2


def grant(session_id: int = 1, **fields: Any) -> plans.SessionGrant:
    values: dict[str, Any] = {
        "session": pb.SessionRef(incarnation=1, session_id=session_id),
        "ordinal": session_id,
        "max_plans_in_flight": NUM_KEPT,
    }
    return plans.SessionGrant(**{**values, **fields})


def run_of(number: int, num_spans: int = 1) -> RunningPlan:
    tables = BlockTables({pb.TIER_DEVICE: 1}, 8)
    batch = prepare_batch(tables, 1, plans.Spans())
    progress = Progress(1, np.ones(num_spans, np.int64))
    transfers = Transfers.read({}, plans.Transfers())
    return RunningPlan(
        number=number,
        payload_version=1,
        digest=b"%d" % number,
        attention=(batch,),
        whole=(batch,),
        on_host=(batch,),
        allocated={},
        to_clear=({}, {}),
        transfers=transfers,
        batches=[],
        of_sources=np.zeros(0, np.int64),
        to_write=(),
        progress=progress,
        checked_version=0,
        checked_taken=0,
        transferred=True,
    )


def opened() -> Session:
    return Sessions().open(grant())


def receipt(number: int) -> pb.SignedPayload:
    return pb.SignedPayload(payload=b"%d" % number)


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 4), st.integers(0, 2), st.booleans())))
def test_a_plan_starts_after_the_one_it_names_and_once(
    steps: list[tuple[bool, int, int, bool]],
) -> None:
    """Each step shows a plan, or finishes the one that runs. The model keeps all receipts."""
    session, receipts, running, newest = opened(), dict[int, pb.SignedPayload](), 0, 0
    for finishes, ahead, behind, resync in steps:
        if finishes:
            if running:
                receipts[running] = receipt(running)
                session.finish(session.latest, receipts[running])  # type: ignore[arg-type]
                running = 0
            continue
        last = max(receipts, default=0)
        number, previous = newest + ahead, max(0, last - behind)
        plan = plans.Plan(number=number, previous=previous, resync=resync)
        kept = list(receipts)[-NUM_KEPT:]
        want: object
        if number < 1:
            want = InvalidRequestError
        elif number in kept:
            want = receipts[number]
        elif number == running:
            want = session.latest
        elif number <= newest:
            want = PlanOutOfOrderError
        elif resync or (not running and previous == last):
            want = None
        else:
            want = PlanOutOfOrderError
        try:
            got: object = session.continued(plan, b"%d" % number)
        except (InvalidRequestError, PlanOutOfOrderError) as error:
            got = type(error)
        assert got == want
        if got is None:
            session.latest = run_of(number)
            running = newest = number


def test_a_refusal_of_a_plan_names_what_is_out_of_order() -> None:
    session = opened()
    session.latest = run_of(3)
    wrong = ((-5, "number"), (0, "number"), (2, "number"), (2**63 - 1, "number"), (4, "previous"))
    for number, field in wrong:
        with refused((InvalidRequestError, PlanOutOfOrderError), f"plan.{field}"):
            session.continued(plans.Plan(number=number), b"")
    session.finish(session.latest, receipt(3))
    with refused(PlanOutOfOrderError, "plan.previous", match="last plan to finish here is 3"):
        session.continued(plans.Plan(number=5, previous=4), b"")
    assert session.continued(plans.Plan(number=5, previous=4, resync=True, finished=3), b"") is None
    with refused(PlanOutOfOrderError, "plan.finished", match="call AbortPlans with whole_tables"):
        session.continued(plans.Plan(number=5, previous=4, resync=True, finished=4), b"")


@pytest.mark.parametrize("has_run", [False, True])
def test_a_number_with_another_digest_is_a_conflict(has_run: bool) -> None:
    session = opened()
    session.latest = run_of(1)
    if has_run:
        session.finish(session.latest, receipt(1))
    with pytest.raises(PlanConflictError):
        session.continued(plans.Plan(number=1), b"other")


def test_a_plan_is_complete_when_all_it_asks_for_was_given() -> None:
    run = run_of(1, num_spans=0)
    run.transferred = False
    with pytest.raises(PlanOutOfOrderError):
        run.check_transferred()
    assert not run.is_complete
    run.transferred = True
    run.check_transferred()
    assert run.is_complete
    assert not run_of(1).is_complete


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session": pb.SessionRef(session_id=0)}, "session.session_id"),
        ({"session": pb.SessionRef(session_id=MAX_SESSION_ID + 1)}, "session.session_id"),
        ({"ordinal": 0}, "ordinal"),
        ({"ordinal": 2**63 - 1}, "ordinal"),
        ({"max_plans_in_flight": 0}, "max_plans_in_flight"),
        ({"max_plans_in_flight": 1025}, "max_plans_in_flight"),
    ],
)
def test_a_grant_out_of_range_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with refused(InvalidRequestError, f"grant.{field}"):
        Sessions().open(grant(**fields))


def test_a_session_that_ended_is_not_opened_again_by_any_id() -> None:
    sessions = Sessions()
    assert sessions.open(grant(1)) is sessions.open(grant(1))
    with pytest.raises(InvalidRequestError, match="session 1 was opened with ordinal 1, not 7"):
        sessions.open(grant(1, ordinal=7))
    sessions.fence(1, 1)
    sessions.fence(9, 9)
    for ended in (grant(1), grant(2, ordinal=1), grant(9)):
        with pytest.raises(SessionExpiredError):
            sessions.open(ended)
    with pytest.raises(SessionExpiredError):
        sessions.get(1)
    assert len(sessions) == 0


@pytest.mark.parametrize("key_ids", [[b"a"], [b"b", b"a"]])
def test_what_ended_under_a_key_stays_ended_under_it(key_ids: list[bytes]) -> None:
    sessions = Sessions()
    sessions.end_all(b"a")
    sessions.open(grant(1))
    sessions.fence(2, 2)
    for key_id in key_ids:
        sessions.end_all(key_id)
        assert len(sessions) == 0
    for ordinal in (1, 2):
        with pytest.raises(SessionExpiredError):
            sessions.open(grant(ordinal))


def test_plans_that_run_are_those_without_a_receipt() -> None:
    sessions = Sessions()
    first, second = sessions.open(grant(1)), sessions.open(grant(2))
    first.latest, second.latest = run_of(1), run_of(2)
    second.finish(second.latest, receipt(2))
    assert sessions.running() == [first.latest]


@given(st.lists(st.integers(1, 40)))
def test_ended_sessions_are_a_set_in_the_fewest_ranges(ordinals: list[int]) -> None:
    ended, known = EndedSessions(), set[int]()
    for ordinal in ordinals:
        ended.add(ordinal)
        known.add(ordinal)
        assert {n for n in range(42) if n in ended} == known
        assert len(ended._first) == sum(n - 1 not in known for n in known)
