"""A reader that takes what the twin alone can read is noticed."""

from __future__ import annotations

import pytest

from kvplane.wire import twin
from tests.helpers.patched_faults import load

TESTS = load("unit/client/test_twin.py")


@pytest.mark.parametrize("encoding", ["unpacked", "chunks"])
def test_an_encoding_that_is_not_read_again_is_noticed(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "whole", lambda message, data, **_: message)
    with pytest.raises(AssertionError):
        TESTS.test_every_encoding_of_a_message_is_read_whole(encoding)


def test_unknown_fields_that_are_dropped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "_first_unknown", lambda _: None)
    with pytest.raises(pytest.fail.Exception):
        TESTS.test_an_unknown_field_is_named("session", "step.session", "")
