"""Whose command runs next: who has used the least time, and nobody earns credit by waiting."""

from __future__ import annotations

from collections import Counter

from data_plane.server.fair_queue import FairQueue, Lane


def served(queue: FairQueue[str], costs: dict[str, float], num_commands: int) -> Counter[str]:
    """How often each caller was served, when all always have another command."""
    count: Counter[str] = Counter()
    for _ in range(num_commands):
        lane, command = queue.take()
        assert lane is not None
        count[lane.caller] += 1
        queue.put(lane, command)
        queue.charge(lane, costs[lane.caller])
    return count


def test_commands_of_a_lane_keep_their_order_and_those_of_none_go_first() -> None:
    queue: FairQueue[int] = FairQueue()
    lane = Lane("a", 1)
    for i in range(3):
        queue.put(lane, i)
    queue.put(None, 9)
    assert [queue.take()[1] for _ in range(4)] == [9, 0, 1, 2]
    assert len(queue) == 0


def test_callers_get_equal_times_however_long_their_commands_are() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("long", "short"):
        queue.put(Lane(name, 1), name)
    count = served(queue, {"long": 1.0, "short": 0.01}, 1010)
    assert 9 <= count["long"] <= 11
    assert count["short"] >= 990


def test_many_sessions_earn_their_caller_no_more() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(20):
        queue.put(Lane("many", i), "")
    queue.put(Lane("one", 99), "")
    count = served(queue, {"many": 1.0, "one": 1.0}, 100)
    assert abs(count["many"] - count["one"]) <= 2


def test_a_callers_sessions_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(4):
        queue.put(Lane("a", i), "")
    sessions = []
    for _ in range(8):
        lane, command = queue.take()
        assert lane is not None
        sessions.append(lane.session_id)
        queue.put(lane, command)
        queue.charge(lane, 1.0)
    assert Counter(sessions) == dict.fromkeys(range(4), 2)


def test_a_pause_earns_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put(Lane("busy"), "")
    served(queue, {"busy": 1.0}, 1000)
    queue.put(Lane("late"), "")
    count = served(queue, {"busy": 1.0, "late": 1.0}, 20)
    assert count["busy"] >= 9


def test_the_rest_of_a_command_comes_before_its_lanes_others() -> None:
    queue: FairQueue[str] = FairQueue()
    lane = Lane("a")
    queue.put(lane, "first")
    queue.put(lane, "second")
    _, command = queue.take()
    queue.put_back(lane, command)
    assert [queue.take()[1] for _ in range(2)] == ["first", "second"]


def test_who_is_gone_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(100):
        queue.put(Lane(f"caller {i}", i), "")
        lane, _ = queue.take()
        queue.charge(lane, 0.5)
    assert len(queue._of_callers._seconds) <= 1
    assert len(queue._of_lanes._seconds) <= 1
