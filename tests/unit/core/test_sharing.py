"""Sessions that share a pool: who waits gets blocks in turn, who yields is told, both by news."""

from __future__ import annotations

from kvplane import ops
from kvplane.errors import SequenceNotFoundError, SequenceRevokedError
from kvplane.results import SequenceState, SessionNews
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import BLOCK
from tests.helpers.core.core_model import (
    FAILED,
    LATER,
    Engine,
    World,
    error_in,
    only,
    status_of,
)
from tests.helpers.refusals import refused


def prompt(num_blocks: int, seed: int = 0) -> list[int]:
    """Tokens of whole blocks, unlike those of other seeds from the first on."""
    return [1000 * (seed + 1) + i for i in range(num_blocks * BLOCK)]


def crowded(num_blocks: int = 8) -> tuple[World, Engine, Engine]:
    """One engine holds all but one of the blocks, another holds none."""
    world = World(num_device=num_blocks, num_host=0)
    one, other = world.engine(), world.engine()
    one.admit(1, prompt(num_blocks - 1))
    return world, one, other


def awaited() -> tuple[World, Engine, Engine]:
    """Return a crowded world whose other engine waits for three blocks, for its sequence 5."""
    world, one, other = crowded()
    other.step(ops.admit(5, prompt(3, 1), wait=True))
    return world, one, other


def test_an_admission_that_waits_is_granted_when_blocks_come_back() -> None:
    world, one, other = crowded()
    later = only(other.step(ops.admit(5, prompt(3, 1), wait=True))).failures[0]
    assert (later.status, later.shortage.queue_position) == (LATER, 1)
    assert later.shortage.num_blocks_needed == 3
    one.do(ops.free([1]))
    ((session_id, pushed),) = other.world.core.take_news()
    assert (session_id, pushed.as_of_number) == (other.id, other.number)
    result = other.step()
    assert result.news.as_of_number == other.number, "the answer's own"
    (granted,) = SessionNews.from_proto(result.news).granted
    assert (granted.sequence_id, granted.num_cached_tokens, granted.num_blocks) == (5, 0, 3)
    assert world.observed().statistics.num_granted_admissions == 1
    result = other.step(ops.append(5, [], 24, first_positions=0))
    assert not only(result).failures
    assert other.queue[-1].plan.changes.sequence_ids, "its table"
    world.core.check_integrity()


def test_an_abort_shows_what_was_granted_and_no_news_say_otherwise() -> None:
    world, one, other = awaited()
    one.do(ops.free([1]))
    (granted,) = SequenceState.all_from_proto(other.resync().sequences)
    assert (granted.sequence_id, granted.num_tokens, granted.num_scheduled_tokens) == (5, 0, 0)
    result = other.step()
    assert SessionNews.from_proto(result.news).granted == (), (
        "it would say that its tokens are known"
    )
    assert not result.HasField("news")
    world.core.check_integrity()


def test_the_news_are_part_of_the_answer_and_come_again_with_it() -> None:
    _, one, other = awaited()
    one.do(ops.free([1]))
    other.step()
    again = other.world.core.step(other.sent[-1].request, other.tenant)
    assert [grant.sequence_id for grant in SessionNews.from_proto(again.news).granted] == [5]
    assert not other.step().HasField("news")


def test_nobody_passes_the_head_who_asks_again_keeps_the_place_and_free_withdraws() -> None:
    world, one, other = crowded()
    third = world.engine()
    for _ in range(3):
        later = only(other.step(ops.admit(5, prompt(6, 1), wait=True))).failures[0]
        assert later.shortage.queue_position == 1
    later = only(third.step(ops.admit(1, prompt(2, 2), wait=True))).failures[0]
    polled = only(third.step(ops.admit(2, prompt(1, 3)))).failures[0]
    for each, position in ((later, 2), (polled, 0)):
        assert each.shortage.reason == cpb.SHORTAGE_REASON_QUEUE
        assert (each.status, each.shortage.queue_position) == (LATER, position)
    assert not only(other.step(ops.free([5]))).failures
    one.do(ops.free([1]))
    assert [grant.sequence_id for grant in SessionNews.from_proto(third.step().news).granted] == [1]
    assert not other.step().HasField("news")


def test_forks_are_granted_with_the_sequence_and_share_its_blocks() -> None:
    _, one, other = crowded()
    other.step(ops.admit(5, prompt(3, 1), fork_sequence_ids=[6, 7], wait=True))
    taken = only(other.step(ops.admit(6, [1], wait=True)))
    assert taken.failures[0].error.reason == "SEQUENCE_EXISTS"
    one.do(ops.free([1]))
    (granted,) = SessionNews.from_proto(other.step().news).granted
    assert granted.sequence_id == 5
    assert other.table(5) == other.table(6) == other.table(7)


def test_a_sequence_that_outstays_its_turn_is_asked_and_then_cut() -> None:
    world, one, other = awaited()
    for position in range(56, 61):
        world.pass_time(6, one, other)
        assert not only(one.send(ops.append(1, [], 1, first_positions=position))).failures
    world.pass_time(0.5)
    news = SessionNews.from_proto(one.step().news)
    assert (news.num_blocks_asked, news.sequences_asked) == (8, (1,))
    assert 0.5 <= news.deadline_s <= 1.0
    world.pass_time(1)
    assert dict(SessionNews.from_proto(one.step().news).cut) == {1: cpb.CUT_REASON_TURN}


def test_a_sequence_that_does_nothing_is_asked_for_with_its_forks_and_then_cut() -> None:
    """Nothing that it wrote is lost but what others need."""
    world, one, other = crowded()
    one.do(ops.fork(1, 2))
    other.step(ops.admit(5, prompt(3, 1), wait=True))
    world.pass_time(10.25, one, other)
    assert SessionNews.from_proto(one.step().news).sequences_asked == (1, 2)
    world.pass_time(2)
    news = SessionNews.from_proto(one.step().news)
    assert dict(news.cut) == dict.fromkeys((1, 2), cpb.CUT_REASON_IDLE)
    one.send(ops.free([2]))
    result = one.step(ops.append(1, [], 1, first_positions=56))
    assert type(error_in(only(result))) is SequenceRevokedError
    assert status_of(only(result)) == FAILED
    assert world.observed().statistics.cut_sequences.total() == 2
    one.run_all()
    one.settle()
    assert one.lookup(prompt(7)) == 40, "what it wrote is found, but for what the other needed"
    assert not only(one.step(ops.free([1]))).failures
    one.run_all()
    one.settle()
    assert [grant.sequence_id for grant in SessionNews.from_proto(other.step().news).granted] == [5]
    world.core.check_integrity()


def test_a_sequence_is_not_idle_while_a_plan_computes_it() -> None:
    world, one, other = crowded()
    one.step(ops.append(1, [], 1, first_positions=56))
    other.step(ops.admit(5, prompt(3, 1), wait=True))
    world.pass_time(24, one, other)
    assert not SessionNews.from_proto(one.step().news).cut
    one.run_all()
    one.settle()
    world.pass_time(5)
    assert not SessionNews.from_proto(one.step().news).cut, "it went on with its receipt"


def test_a_sequence_that_an_abort_leaves_on_the_host_is_not_cut_for_others() -> None:
    world = World(num_device=13, num_host=8)
    one, other, third = world.engine(), world.engine(), world.engine()
    one.admit(1, prompt(5))
    one.do(ops.swap([1], "host"))
    one.step(ops.swap([1], "device"))
    one.abort(one.number)
    other.admit(1, prompt(7, 1))
    third.step(ops.admit(1, prompt(8, 2), wait=True))
    world.pass_time(50, one, other, third)
    assert not one.step().HasField("news")
    assert dict(SessionNews.from_proto(other.step().news).cut) == {1: cpb.CUT_REASON_IDLE}


def test_an_admission_that_is_impossible_by_now_is_given_up() -> None:
    world = World(num_device=8, num_host=0, max_sequences=2)
    one, other = world.engine(), world.engine()
    one.admit(1, prompt(6))
    other.admit(1, prompt(1, 1))
    other.step(ops.admit(5, prompt(3, 2), wait=True))
    assert not only(other.send(ops.fork(1, 2))).failures
    one.do(ops.free([1]))
    assert dict(SessionNews.from_proto(other.step().news).cut) == {5: cpb.CUT_REASON_IMPOSSIBLE}


def test_an_admission_in_line_is_judged_again_when_its_turn_comes() -> None:
    world = World(num_device=10, max_tenant_blocks=8)
    one, other = world.engine(), world.engine()
    one.admit(1, prompt(6))
    one.admit(2, prompt(1, 1))
    one.step(ops.free([1]))  # whose receipt is missing
    (later,) = only(other.step(ops.admit(5, prompt(5, 2), wait=True))).failures
    assert later.shortage.queue_position == 1
    one.step(ops.append(2, [5] * 4 * BLOCK, 4 * BLOCK, first_positions=BLOCK))
    one.run_all()
    one.settle()
    assert dict(SessionNews.from_proto(other.step().news).cut) == {5: cpb.CUT_REASON_QUOTA}
    one.do(ops.free([2]))
    assert not only(other.admit(5, prompt(5, 2))).failures


def test_tokens_of_a_sequence_that_was_cut_do_not_fail_its_sessions_step() -> None:
    world, one, other = crowded()
    one.do(ops.append(1, [], 1, first_positions=56))
    other.step(ops.admit(5, prompt(3, 1), wait=True))
    world.pass_time(42, one, other)
    deferred = ops.deferred_tokens([1], [1], [57], [1], [9])
    one.call("step", cpb.StepRequest(deferred_tokens=deferred))
    cut_ids = one.sent[-1].answer.news.cut_sequence_ids
    assert columns.read(INT64, cut_ids, "ids").tolist() == [1]
    others = ops.deferred_tokens([1, 7], [1, 1], [57, 1], [1, 1], [9, 9])
    with refused(SequenceNotFoundError, "deferred_tokens.sequence_ids[1]"):
        one.call("step", cpb.StepRequest(deferred_tokens=others))


def test_blocks_of_a_sequence_that_was_cut_are_others_before_its_data_plane_knows() -> None:
    """Its table there is stale until its session's next plan, which drops it."""
    world, one, other = awaited()
    held = set(one.table(1))
    world.pass_time(35, one, other)
    other.step(ops.append(5, [], 24, first_positions=0))
    assert held & set(other.table(5))
    other.run_all()
    one.step(ops.free([]))
    changes = one.queue[-1].plan.changes
    assert (changes.kinds, changes.sequence_ids) == (
        bytes([plan_pb2.TABLE_CHANGE_KIND_DROP]),
        columns.pack(INT64, [1]),
    )


# What metrics tell of it


def test_waiting_admissions_are_counted_and_their_wait_is_measured() -> None:
    world, one, other = awaited()
    assert world.observed().num_waiting == 1
    world.pass_time(1.0, one, other)
    one.do(ops.free([1]))
    assert world.observed().num_waiting == 0
    wait = world.observed().statistics.wait_s
    assert (sum(wait.counts), wait.sum) == (1, 1.0)


def test_what_a_sequence_that_was_cut_reads_again_is_counted_apart() -> None:
    world, one, other = awaited()
    world.pass_time(40, one, other)
    assert world.observed().statistics.cut_sequences.total() == 1
    one.step(ops.free([]))  # hears of it
    one.run_all()
    one.settle()
    other.step()  # is granted its admission
    other.do(ops.free([5]))
    one.step(ops.admit(1, prompt(7)))
    assert world.observed().statistics.reread_lookup_tokens == 7 * BLOCK
    assert world.observed().statistics.reread_hit_tokens > 0
