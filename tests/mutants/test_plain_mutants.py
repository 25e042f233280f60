"""Faults of plain steps, which the comparison with the same steps as messages must notice."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from control_plane.steps import plain_steps
from tests.helpers.patched_faults import load

NUM_WALKS = 40
# What is left out, or what takes its place.
FAULTS = {
    "receipts are not applied": ("apply_receipts(session, highest)\n", "pass\n"),
    "signatures are not looked at": ("        except BadSignatureError:\n", "        except ():\n"),
    "a receipt may say what it likes": (
        "payload != session.receipt_of(number, shard)",
        "False",
    ),
    "any number is the next": ("number != numbers.last + 1", "number < numbers.last"),
    "there may be any number of plans": ("num_left >= config.max_plans_in_flight", "num_left > 9"),
    "there may be any number of items": ("request.num_items > config.max_operations", "False"),
    "who was admitted is not known": (
        "sharing.started(member, key, ids, request.num_tokens, came_to[0])",
        "pass",
    ),
    "plans are of another digest": ("signing.digest(payload)", "signing.digest(payload[1:])"),
    "refused items are not told": ("if failures:", "if False:"),
    "an answer is not remembered": (
        "numbers.remember(request.content, answer",
        "numbers.remember(b'', answer",
    ),
    "a refusal is not remembered": (
        "numbers.remember(request.content, encoded",
        "numbers.remember(b'', encoded",
    ),
    "what never fits is asked for again": ("if failure[1] not in LATER:", "if False:"),
    "a refusal says less than it could": (
        "shortage_of(session, failure, must_wait)",
        "shortage_of(session, (*failure[:2], 0, *failure[3:]))",
    ),
    "a refusal uses no number": (
        "numbers.use()\n        pool.statistics",
        "pool.statistics",
    ),
    "who waits is passed": ("not sharing.is_idle or", ""),
}


TESTS = load("unit/core/test_plain_steps.py")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_walk_notices(fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(plain_steps.__file__).read_text()
    assert source.count(fault[0]) == 1
    faulty: dict[str, Any] = {"__name__": "faulty_plain_steps"}
    exec(compile(source.replace(*fault), "faulty_plain_steps", "exec", dont_inherit=True), faulty)
    monkeypatch.setattr("control_plane.core.PlainSteps", faulty["PlainSteps"])
    with pytest.raises((AssertionError, ArithmeticError, LookupError, ValueError, TypeError)):
        TESTS.test_plain_steps_stand_in_line_as_others_do()
        for seed in range(NUM_WALKS):
            TESTS.walked(Random(seed))
