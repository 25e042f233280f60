"""The client's numbering over a network that repeats, drops, delays and reorders messages."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import (
    CancelledError,
    DeadlineExceededError,
    KvplaneError,
    PlaneUnavailableError,
    PoolFullError,
    QuotaExceededError,
    StepConflictError,
    StepOutOfOrderError,
)
from kvplane.session.step_numbering import Steps
from kvplane.transport.retry import Deadline
from kvplane.wire.v1 import session_pb2 as cpb

UNKNOWN_OUTCOMES = (DeadlineExceededError, CancelledError, PlaneUnavailableError)


class Plane:
    """Answers numbered requests as the contract says, and forgets none. A request whose content
    begins with "bad" fails as a whole. ``contents``: of the requests that ran, in order.
    """

    def __init__(self) -> None:
        self.contents: list[str] = []

    def take(self, number: int, content: str) -> str:
        error: KvplaneError
        if number == len(self.contents) + 1:
            self.contents.append(content)
        next_number = len(self.contents) + 1
        if not 1 <= number <= len(self.contents):
            error = StepOutOfOrderError("is not the next", field="number")
        elif self.contents[number - 1] != content:
            error = StepConflictError("was used", field="number")
        elif content.startswith("bad"):
            error, next_number = PoolFullError("later"), number + 1
        else:
            return f"{content} ran as {number}"
        error.next_number = next_number
        raise error


class Network:
    """Carries requests to a plane. ``fates``: of the messages in turn, "answer" after the last.

        answer   the plane's answer arrives
        refuse   the request is refused before its number is looked at
        drop     neither the request nor an answer arrives
        forget   the request arrives, and its answer is lost

    An error is the answer. Whatever its fate, a copy of a message may arrive at any later time.
    """

    def __init__(
        self, *fates: str | KvplaneError, unknown: type[KvplaneError] = DeadlineExceededError
    ) -> None:
        self.plane = Plane()
        self.fates = list(fates)
        self.copies: list[tuple[int, str]] = []
        self._unknown = unknown

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.copies]

    async def send(self, request: Any, _: Deadline) -> str:
        message = request.number, request.operations[0].admit.token_ids.decode()
        self.copies.append(message)
        fate = self.fates.pop(0) if self.fates else "answer"
        if isinstance(fate, KvplaneError):
            raise fate
        if fate == "refuse":
            raise QuotaExceededError("too many bytes", retry_delay_s=0.1)
        if fate == "answer":
            return self.plane.take(*message)
        if fate == "forget":
            self.deliver(message)
        raise self._unknown("no answer")

    def deliver(self, copy: tuple[int, str]) -> None:
        with suppress(KvplaneError):
            self.plane.take(*copy)


class Caller:
    """Makes calls through the client's numbering."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.steps = Steps()

    async def call(self, content: str) -> str:
        operation = cpb.Operation(admit=cpb.Admit(token_ids=content.encode()))
        request = cpb.StepRequest(operations=[operation])
        # So short that no attempt is made again by itself.
        answer: str = await self.steps.call(request, self.network.send, Deadline.after(0.02))
        return answer

    async def fail(self, content: str, *errors: type[KvplaneError]) -> None:
        with pytest.raises(errors):
            await self.call(content)


async def test_an_error_that_gives_the_next_number_has_used_its_own() -> None:
    caller = Caller(Network())
    await caller.fail("bad", PoolFullError)
    assert await caller.call("good") == "good ran as 2"
    assert (caller.network.numbers, caller.steps.last_number) == ([1, 2], 2)


async def test_a_late_copy_of_a_refused_try_changes_nothing() -> None:
    caller = Caller(Network("answer", "refuse"))
    await caller.call("a")
    await caller.fail("b", QuotaExceededError)
    assert caller.steps.last_number == 1
    assert await caller.call("c") == "c ran as 2"
    for copy in caller.network.copies:
        caller.network.deliver(copy)
    assert caller.network.plane.contents == ["a", "c"]
    assert caller.network.numbers == [1, 2, 2]


async def test_a_call_whose_number_a_late_copy_has_used_is_numbered_anew() -> None:
    caller = Caller(Network("refuse"))
    await caller.fail("a", QuotaExceededError)
    caller.network.deliver((1, "a"))
    assert await caller.call("b") == "b ran as 2"
    assert await caller.call("c") == "c ran as 3"
    assert caller.network.numbers == [1, 1, 2, 3]


async def test_a_call_numbered_anew_and_then_refused_keeps_its_new_number() -> None:
    caller = Caller(Network("refuse", "answer", "refuse"))
    await caller.fail("a", QuotaExceededError)
    caller.network.deliver((1, "a"))
    await caller.fail("b", QuotaExceededError)
    caller.network.deliver((2, "b"))
    assert await caller.call("b") == "b ran as 2"
    assert caller.network.numbers == [1, 1, 2, 2]


@pytest.mark.parametrize("unknown", UNKNOWN_OUTCOMES)
@pytest.mark.parametrize("fate", ["drop", "forget"])
async def test_a_refusal_does_not_settle_a_call_in_doubt(
    unknown: type[KvplaneError], fate: str
) -> None:
    caller = Caller(Network(fate, "refuse", "refuse", unknown=unknown))
    # Under load the short deadline may be the one that ends the call.
    await caller.fail("a", unknown, DeadlineExceededError)
    await caller.fail("a", QuotaExceededError)
    await caller.fail("b", QuotaExceededError)
    assert await caller.call("b") == "b ran as 2"
    assert [each.answer for each in caller.steps.abandoned] == ["a ran as 1"]
    assert caller.network.numbers == [1, 1, 1, 1, 2]


async def test_an_error_that_gives_the_next_number_settles_a_call_in_doubt() -> None:
    caller = Caller(Network("forget"))
    await caller.fail("bad", DeadlineExceededError)
    assert await caller.call("good") == "good ran as 2"
    assert (caller.network.numbers, caller.steps.abandoned) == ([1, 1, 2], [])


async def test_a_number_out_of_order_is_replaced_unless_an_earlier_copy_may_have_run() -> None:
    error = StepOutOfOrderError("1 is not remembered")
    error.next_number = 7
    fresh, in_doubt = Caller(Network(error)), Caller(Network("drop", error))
    for caller in (fresh, in_doubt):
        caller.network.plane.contents = ["another"] * 6
    assert await fresh.call("a") == "a ran as 7"
    assert fresh.network.numbers == [1, 7]
    await in_doubt.fail("a", DeadlineExceededError)
    await in_doubt.fail("a", StepOutOfOrderError)
    assert await in_doubt.call("b") == "b ran as 7"
    assert in_doubt.network.numbers == [1, 1, 7]


class NeverNext(Network):
    """Says of each number that another one is the next."""

    async def send(self, request: Any, _: Deadline) -> str:
        await asyncio.sleep(0)
        error = StepOutOfOrderError("another is the next")
        error.next_number = request.number + 1
        raise error


async def test_a_number_that_never_fits_is_not_looked_for_for_ever() -> None:
    same = StepOutOfOrderError("this one is the next")
    same.next_number = 1
    await Caller(Network(same)).fail("a", StepOutOfOrderError)
    await Caller(NeverNext()).fail("a", DeadlineExceededError)


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_each_call_runs_once_whatever_the_network_does(rng: Random, num_calls: int) -> None:
    asyncio.run(walk(rng, num_calls))


class WildNetwork(Network):
    """Each message has a random fate until ``is_calm``, and copies arrive before any of them.
    ``doubtful``: the contents that may have run, or may still run, without an answer.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.is_calm = False
        self.doubtful: set[str] = set()
        self._rng = rng

    async def send(self, request: Any, deadline: Deadline) -> str:
        rng = self._rng
        for copy in rng.choices(self.copies, k=rng.randint(0, 2)) if self.copies else []:
            self.deliver(copy)
        fates = ["answer"] if self.is_calm else ["answer", "refuse", "drop", "forget"]
        self.fates = [rng.choice(fates)]
        try:
            return await super().send(request, deadline)
        except UNKNOWN_OUTCOMES:
            self.doubtful.add(self.copies[-1][1])
            raise
        except StepConflictError:
            self.doubtful.discard(self.copies[-1][1])  # Its number is used up by another content.
            raise


async def walk(rng: Random, num_calls: int) -> None:
    network = WildNetwork(rng)
    caller, answers = Caller(network), dict[str, str]()
    for i in range(num_calls):
        content = f"{rng.choice(['good', 'bad'])} {i}"
        for _ in range(rng.randint(1, 3)):  # The caller may try again before it goes on.
            try:
                answers[content] = await caller.call(content)
            except (QuotaExceededError, *UNKNOWN_OUTCOMES):
                continue
            except PoolFullError:
                assert content.startswith("bad")
                assert content in network.plane.contents
            break
    network.is_calm = True
    answers["last"] = await caller.call("last")
    contents = list(network.plane.contents)
    assert contents[-1] == "last"
    assert len(set(contents)) == len(contents), "a call ran twice"
    assert network.doubtful <= set(contents), "a call in doubt was taken as settled"
    abandoned = {str(each.answer).split(" ran")[0]: each for each in caller.steps.abandoned}
    for content, answer in answers.items():
        assert answer == f"{content} ran as {contents.index(content) + 1}"
    for content, each in abandoned.items():
        assert contents[each.number - 1] == content
    for copy in network.copies:
        network.deliver(copy)
    assert network.plane.contents == contents, "a late copy ran"
