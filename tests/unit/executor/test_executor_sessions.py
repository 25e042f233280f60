"""What an executor keeps of sessions, and what it tells a control plane of its blocks."""

from __future__ import annotations

import threading

import pytest

from kvplane.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    SessionExpiredError,
    StaleIncarnationError,
)
from kvplane.wire import signing
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    blocks_of,
    publications,
    set_blocks,
    span,
)


def test_a_grant_for_another_layout_is_refused(rig: Rig) -> None:
    with rig.refuses(LayoutMismatchError, "grant.layout_fingerprint"):
        rig.executor.open(rig.author.grant(2, layout_fingerprint=bytes(32)))


def test_a_new_incarnation_drops_tables_and_keeps_memory_and_publications(rig: Rig) -> None:
    rig.admit(1, num_tokens=16)
    rig.publish(0)
    before = rig.snapshot()
    rig.executor.install(2, signing.new_key())
    assert rig.snapshot() == before
    assert rig.executor.num_sequences == 0
    with pytest.raises(SessionExpiredError):
        rig.executor.receipt(1)
    with pytest.raises(StaleIncarnationError):
        rig.executor.install(1, signing.new_key())


def test_a_report_has_generations_and_publications_of_both_tiers_in_parts(rig: Rig) -> None:
    rig.admit(1, num_tokens=16)
    rig.run(2, set_blocks(2, [(3, 4)]), set_blocks(3, [(1, 9)], tier=HOST))
    rig.publish(1)
    rig.publish(0)
    parts = rig.executor.report(2)
    assert [part.last for part in parts] == [False] * 3 + [True]
    reported = [(blocks.tier, blocks_of(blocks)) for part in parts for blocks in part.blocks]
    want = [(DEVICE, [(0, 1), (1, 1)]), (DEVICE, [(3, 4)]), (HOST, [(1, 9)])]
    assert reported == want
    published = [blocks_of(p) for part in parts for p in part.publications]
    assert published == [[(1, 1), (0, 1)]], "in the order in which they were published"


def test_what_is_published_is_reported_as_it_came_parents_first(rig: Rig) -> None:
    rig.run(1, set_blocks(1, [(i, i + 1) for i in (6, 2, 4)]))
    chain = publications((6, 7), (2, 3), (4, 5))
    other = publications((2, 3))
    other.tenant, other.namespace = "ann", "n"
    assert rig.executor.publish(chain) == 3
    assert [p for part in rig.executor.report() for p in part.publications] == [chain]
    assert rig.executor.publish(other) == 1, "another scope takes the block over"
    reported = [p for part in rig.executor.report() for p in part.publications]
    assert [(p.tenant, p.namespace, blocks_of(p)) for p in reported] == [
        ("default", "", [(6, 7), (4, 5)]),
        ("ann", "n", [(2, 3)]),
    ]


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


def test_a_key_that_comes_again_after_another_keeps_what_has_ended(rig: Rig) -> None:
    """Two control planes of one incarnation take turns."""
    rig.fence(3)
    rig.executor.install(1, signing.new_key())
    rig.executor.install(1, rig.author.key)
    for ended in (1, 3):
        with rig.refuses(SessionExpiredError, "grant.session"):
            rig.open(ended)
    assert rig.open(2) == 2
