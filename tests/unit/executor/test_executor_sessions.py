"""Sessions of an executor: their grants and fences."""

from __future__ import annotations

import threading

import pytest

from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    SessionExpiredError,
    StaleIncarnationError,
)
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import set_blocks, span


def test_a_grant_for_another_layout_is_refused(rig: Rig) -> None:
    with rig.refuses(LayoutMismatchError, "grant.layout_fingerprint"):
        rig.executor.open(rig.author.grant(2, layout_fingerprint=bytes(32)))


def test_a_fence_waits_for_the_command_that_runs() -> None:
    inside, go_on = threading.Event(), threading.Event()
    rig = Rig()
    rig.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 2))
    compute = rig.executor._compute
    write = compute.write

    def slow_write(*args: object) -> None:
        inside.set()
        assert go_on.wait(10)
        write(*args)  # type: ignore[arg-type]

    compute.write = slow_write  # type: ignore[method-assign, assignment]
    writer = threading.Thread(target=rig.layer, args=(0, 2))
    writer.start()
    assert inside.wait(10)
    fence = threading.Thread(target=rig.fence, args=(1,))
    fence.start()
    fence.join(0.1)
    assert fence.is_alive(), "the fence is done while a kernel runs"
    go_on.set()
    fence.join(10)
    writer.join(10)
    assert not fence.is_alive()
    with pytest.raises(SessionExpiredError):
        rig.executor.receipt(1)


def test_a_fence_of_another_incarnation_ends_nothing(rig: Rig) -> None:
    other = pb.SessionRef(incarnation=2, session_id=1)
    with rig.refuses(StaleIncarnationError, "session.incarnation"):
        rig.executor.fence(other, 1)
    with rig.refuses(InvalidRequestError, "ordinal"):
        rig.executor.fence(rig.author.session(1), 0)
    assert rig.open(1) == 1
