"""The quota of bytes a second: what a caller moves in the long run, and that nobody else pays."""

from __future__ import annotations

import pytest

from kvplane.errors import QuotaExceededError
from kvplane.serving.limits.byte_quota import ByteQuota


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quota(clock: Clock) -> ByteQuota:
    return ByteQuota(1024, clock)


def delay_of(quota: ByteQuota, caller: str, num_bytes: int = 1) -> float:
    """Seconds that a refused caller is told to wait."""
    with pytest.raises(QuotaExceededError) as refused:
        quota.take(caller, num_bytes)
    assert refused.value.retry_delay_s is not None
    return refused.value.retry_delay_s


def test_the_bytes_of_a_second_may_come_at_once_and_more_wait(
    quota: ByteQuota, clock: Clock
) -> None:
    for _ in range(4):
        quota.take("ann", 256)
    quota.take("ann", 512)
    assert delay_of(quota, "ann") == 0.5
    clock.now_s += 0.25
    assert delay_of(quota, "ann") == 0.25
    clock.now_s += 0.25
    quota.take("ann", 1)


def test_what_one_moves_does_not_count_for_others(quota: ByteQuota) -> None:
    quota.take("ann", 4096)
    delay_of(quota, "ann")
    quota.take("bob", 256)


def test_a_message_of_more_than_a_second_is_let_in_and_made_up_for(
    quota: ByteQuota, clock: Clock
) -> None:
    quota.take("ann", 10 * 1024)
    assert delay_of(quota, "ann") == 9.0
    clock.now_s += 9.0
    quota.take("ann", 1)


def test_what_is_refused_is_not_counted(quota: ByteQuota) -> None:
    quota.take("ann", 2048)
    delays = {delay_of(quota, "ann", 4096) for _ in range(10)}
    assert delays == {1.0}


def test_what_was_let_in_before_counts_and_is_not_refused(quota: ByteQuota) -> None:
    for _ in range(3):
        quota.add("ann", 1024)
    assert delay_of(quota, "ann") == 2.0


@pytest.mark.parametrize("pause_s", [0.75, 1000.0])
def test_a_pause_earns_no_more_than_a_second(
    quota: ByteQuota, clock: Clock, pause_s: float
) -> None:
    quota.take("ann", 256)
    clock.now_s += pause_s
    quota.take("ann", 1024)
    quota.take("ann", 512)
    assert delay_of(quota, "ann") == 0.5


def test_a_greedy_caller_moves_its_rate_in_the_long_run(quota: ByteQuota, clock: Clock) -> None:
    size, num_moved = 100, 0
    for _ in range(1000):
        try:
            quota.take("ann", size)
            num_moved += size
        except QuotaExceededError:
            clock.now_s += 1 / 16
    seconds = clock.now_s - 100.0
    assert seconds > 10
    assert 0.9 * 1024 * seconds < num_moved <= 1024 * (seconds + 1) + size


def test_callers_that_have_paused_are_forgotten(quota: ByteQuota, clock: Clock) -> None:
    for i in range(1000):
        quota.take(f"caller {i}", 512)
    quota.take("debtor", 4096)
    clock.now_s += 1.0
    quota.take("ann", 1)
    assert len(quota) == 2
    assert delay_of(quota, "debtor") == 2.0


def test_without_a_quota_nothing_is_refused_or_remembered() -> None:
    quota = ByteQuota()
    for _ in range(3):
        quota.take("ann", 2**62)
        quota.add("ann", 2**62)
    assert len(quota) == 0
