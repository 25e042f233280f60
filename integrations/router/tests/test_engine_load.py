"""Tests a router's estimates of an engine: how fast it is, and how much it has yet to compute."""

from __future__ import annotations

import random

import pytest

from kvplane.integrations.router.engine_load import EngineLoad


def test_what_waits_is_computed_one_after_another() -> None:
    load = EngineLoad(100.0)
    load.sent(1, 200, 10.0, is_told=True)
    load.sent(2, 300, 10.0, is_told=True)
    assert load.wait_s(10.0) == pytest.approx(5.0)
    assert load.wait_s(11.0) == pytest.approx(4.0)
    # The first takes longer than it should: nothing more is known of the second.
    assert load.wait_s(100.0) == pytest.approx(3.0)


def test_a_rate_is_learnt_from_first_bytes() -> None:
    load = EngineLoad(50.0)
    draw, now_s = random.Random(1), 0.0
    for number in range(300):
        num_tokens = draw.randint(10, 1000)
        load.sent(number, num_tokens, now_s, is_told=True)
        now_s += num_tokens / 400
        load.answered(number, now_s)
        load.ended(number)
        now_s += draw.random()  # idle times do not count
    assert load.tokens_per_s == pytest.approx(400, rel=0.01)
    assert (load.wait_s(now_s), load.num_open) == (0.0, 0)


def test_prompts_computed_together_give_the_rate_of_all() -> None:
    load, now_s = EngineLoad(50.0), 0.0
    for number in range(0, 400, 4):
        for i in range(4):
            load.sent(number + i, 100, now_s, is_told=True)
        now_s += 1.0
        for i in (2, 0, 3, 1):
            load.answered(number + i, now_s)
            load.ended(number + i)
    assert load.tokens_per_s == pytest.approx(400, rel=0.02)


def test_a_request_that_is_not_told_of_leaves_the_line_in_its_time() -> None:
    load = EngineLoad(100.0)
    load.sent(1, 200, 0.0, is_told=False)
    load.sent(2, 300, 0.0, is_told=True)
    assert load.wait_s(1.0) == pytest.approx(4.0)
    assert load.wait_s(2.5) == pytest.approx(2.5)
    load.ended(1)
    assert load.wait_s(2.5) == pytest.approx(2.5)
    assert load.num_open == 1


def test_a_request_that_is_not_told_of_counts_with_the_next_that_is() -> None:
    load, now_s = EngineLoad(1.0), 0.0
    for number in range(0, 400, 2):
        load.sent(number, 300, now_s, is_told=False)
        load.sent(number + 1, 100, now_s, is_told=True)
        now_s += 1.0
        load.answered(number + 1, now_s)
        load.ended(number)
        load.ended(number + 1)
    assert load.tokens_per_s == pytest.approx(400, rel=0.02)


def test_who_gives_up_waits_no_longer() -> None:
    load = EngineLoad(100.0)
    load.sent(1, 500, 0.0, is_told=True)
    load.ended(1)
    load.answered(1, 0.5)  # too late to count
    assert (load.wait_s(0.5), load.num_open, load.tokens_per_s) == (0.0, 0, 100.0)
