"""Faults of requests in slices, with the test that catches each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control_plane.core import ControlPlane
from control_plane.pools.pool import Pool
from control_plane.pools.shards import EndedSession
from control_plane.server import service
from control_plane.server.service import LongRequests
from control_plane.sessions.numbering import Numbering
from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.sessions import Sessions
from control_plane.steps import answers, operations, requests, slices
from control_plane.steps.answers import StepAnswer
from control_plane.steps.operations import Swap
from kvplane.slices import run_to_end
from kvplane.wire.v1 import session_pb2 as cpb

Fault = Callable[[pytest.MonkeyPatch], None]


def the_queue_decides_between_slices(patch: pytest.MonkeyPatch) -> None:
    """Blocks are granted to a session in the middle of its step."""
    patch.setattr(PoolAdmission, "set_busy", lambda self, session_id, is_busy: None)


def what_was_due_waits_for_the_timer(patch: pytest.MonkeyPatch) -> None:
    """A session that sends one long request after another is never cut."""

    def set_busy(self: PoolAdmission, session_id: int, is_busy: bool) -> None:
        if session_id in self.sessions:
            self._queue.set_busy(session_id, is_busy)

    patch.setattr(PoolAdmission, "set_busy", set_busy)


def an_end_is_not_noticed_between_slices(patch: pytest.MonkeyPatch) -> None:
    """A request goes on though its session is gone."""

    patch.setattr(Sessions, "require_open", lambda self, session: None)


def each_part_counts_items_from_its_own_first(patch: pytest.MonkeyPatch) -> None:
    """Refused items are those of another sequence."""

    def parts_of(message: cpb.Append) -> Iterator[tuple[int, cpb.Append]]:
        for _, part in slices.parts_of(message):
            yield 0, part

    patch.setattr(operations, "parts_of", parts_of)


def fenced_before_all_is_released(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a session that still has sequences are free."""

    def free_if_done(self: Sessions, pool: Pool, ended: EndedSession) -> None:
        ended.is_released = True
        original(self, pool, ended)

    original = Sessions._free_if_done
    patch.setattr(Sessions, "_free_if_done", free_if_done)


def a_fence_is_forgotten_while_it_releases(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a session that was fenced early stay retired."""

    def fenced(self: Sessions, pool: Pool, shard: int, session_ids: list[int]) -> None:
        ended = pool.shards.ended
        released = [i for i in session_ids if i in ended and ended[i].is_released]
        original(self, pool, shard, released)

    original = Sessions.fenced
    patch.setattr(Sessions, "fenced", fenced)


def a_large_swap_is_not_moved(patch: pytest.MonkeyPatch) -> None:
    """The first part of a swap is all of it."""

    def move(self: Any, step: operations.Step, num_blocks: int) -> Iterator[None]:
        if num_blocks > operations.SLICE_BLOCKS:
            yield
        step.native.swap_some(step.handle, operations.SLICE_BLOCKS)

    patch.setattr(Swap, "move", move)


def a_swap_is_one_slice(patch: pytest.MonkeyPatch) -> None:
    """Everybody waits for it."""
    patch.setattr(operations, "SLICE_BLOCKS", 1 << 60)


def slices_run_without_a_turn(patch: pytest.MonkeyPatch) -> None:
    """Everybody waits for the whole request."""
    patch.setattr(service, "TURNS_OF_A_CALL", 0)


def two_run_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """Two sessions are in the middle of a request."""

    async def run(self: LongRequests, session_id: int, slices: Any) -> Any:
        self._lane = asyncio.Lock()
        return await original(self, session_id, slices)

    original = LongRequests._run
    patch.setattr(LongRequests, "_run", run)


def a_session_does_not_wait_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """A session's next request runs in the middle of the one before."""

    async def wait(self: LongRequests, session_id: int) -> None:
        pass

    patch.setattr(LongRequests, "wait", wait)


def a_caller_that_goes_ends_it(patch: pytest.MonkeyPatch) -> None:
    """Half a step is left behind."""
    patch.setattr(asyncio, "shield", lambda task: task)


def its_end_is_not_told_once_its_caller_has_gone(patch: pytest.MonkeyPatch) -> None:
    """Others are not told of blocks that came back."""

    def forget(self: LongRequests, session_id: int, task: Any) -> None:
        del self._running[session_id]

    patch.setattr(LongRequests, "_forget", forget)


def what_has_not_begun_stays_in_the_lane(patch: pytest.MonkeyPatch) -> None:
    """Requests of callers that have gone pile up."""

    async def run(self: LongRequests, session_id: int, slices: Any, *, has_begun: bool) -> Any:
        return await original(self, session_id, slices, has_begun=True)

    original = LongRequests.run
    patch.setattr(LongRequests, "run", run)


def it_is_one_slice(patch: pytest.MonkeyPatch) -> None:
    """A long request has no slices."""

    def run(self: ControlPlane, request: Any, tenant: str) -> Any:
        yield from ()
        return run_to_end(original(self, request, tenant))

    original = ControlPlane.run
    patch.setattr(ControlPlane, "run", run)


def an_answer_is_repeated_without_its_plan(patch: pytest.MonkeyPatch) -> None:
    """Who asks again for it gets no plan."""

    def remember(self: Numbering, content: bytes, message: Any, *error: Any) -> None:
        if isinstance(message, StepAnswer):
            step = cpb.StepResponse.FromString(message.step)
            step.ClearField("plan")
            message = StepAnswer(step.SerializeToString(), 0)
        original(self, content, message, *error)

    original = Numbering.remember
    patch.setattr(Numbering, "remember", remember)


def an_answer_begins_with_its_plan(patch: pytest.MonkeyPatch) -> None:
    """Its bytes are not those of the message."""

    def step_answer(*parts: Any) -> StepAnswer:
        answer = answers.step_answer(*parts)
        rest = cpb.StepResponse.FromString(answer.step)
        head = cpb.StepResponse(plan=rest.plan).SerializeToString()
        rest.ClearField("plan")
        return answer._replace(encoded=head + rest.SerializeToString(), step_at=0)

    patch.setattr(requests, "step_answer", step_answer)


def operations_are_checked_at_once(patch: pytest.MonkeyPatch) -> None:
    """Others wait for all of them."""
    original = ControlPlane.validate

    def at_once(self: ControlPlane, request: Any, tenant: str) -> Any:
        yield from ()
        return run_to_end(original(self, request, tenant))

    patch.setattr(ControlPlane, "validate", at_once)


CORE = {
    what_was_due_waits_for_the_timer: "test_a_busy_session_is_cut_at_the_end_of_its_request",
    the_queue_decides_between_slices: "test_nobody_is_granted_blocks_between_the_slices",
    an_end_is_not_noticed_between_slices: "test_a_session_may_end_between_the_slices",
    each_part_counts_items_from_its_own_first: "test_a_request_in_slices_is_answered_as_in_one",
    fenced_before_all_is_released: "test_a_session_that_ends_is_released_between_requests",
    a_fence_is_forgotten_while_it_releases: "test_a_session_that_ends_is_released_between_requests",
    an_answer_is_repeated_without_its_plan: "test_a_request_in_slices_is_answered_as_in_one",
    an_answer_begins_with_its_plan: "test_a_request_in_slices_is_answered_as_in_one",
    a_large_swap_is_not_moved: "test_a_request_in_slices_is_answered_as_in_one",
    a_swap_is_one_slice: "test_a_session_may_end_while_many_blocks_are_swapped",
    operations_are_checked_at_once: "test_operations_are_checked_a_few_at_a_time",
    it_is_one_slice: "test_others_step_between_the_slices",
}
LANE = {
    slices_run_without_a_turn: "test_others_run_between_the_slices",
    two_run_at_a_time: "test_two_take_turns_in_the_order_in_which_they_came",
    a_session_does_not_wait_for_its_own: "test_a_session_waits_for_its_own_and_for_no_other",
    a_caller_that_goes_ends_it: "test_it_goes_on_when_its_caller_goes",
    its_end_is_not_told_once_its_caller_has_gone: "test_it_goes_on_when_its_caller_goes",
    what_has_not_begun_stays_in_the_lane: "test_what_has_not_begun_goes_with_its_caller",
}
