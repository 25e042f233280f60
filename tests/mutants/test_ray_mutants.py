"""Faults of a fleet on Ray, each of which a test without Ray must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvplane.integrations.ray import placement, supervisor
from kvplane.integrations.ray.placement import FleetShape
from tests.helpers.patched_faults import load

TESTS = load("../integrations/ray/tests/test_ray_placement.py")
TESTS.WAIT_S = 2.0  # what a fault does not do, it does not do later


def shards_have_the_same_index(patch: pytest.MonkeyPatch) -> None:
    """All hold the first part."""
    original = placement.shards
    first = ("--shard-index", "0")

    def shards(shape: FleetShape, pool: str) -> list[placement.Server]:
        return [
            dataclasses.replace(each, arguments=(*each.arguments, *first))
            for each in original(shape, pool)
        ]

    patch.setattr(placement, "shards", shards)


def control_planes_take_any_port(patch: pytest.MonkeyPatch) -> None:
    """One that starts again is elsewhere."""
    original = placement.control_planes
    patch.setattr(
        placement,
        "control_planes",
        lambda shape: [dataclasses.replace(each, port=0) for each in original(shape)],
    )


def several_need_no_election(patch: pytest.MonkeyPatch) -> None:
    """Two control planes that both lead."""
    patch.setattr(FleetShape, "__post_init__", lambda self: None)


def servers_outlive_their_actors(patch: pytest.MonkeyPatch) -> None:
    """The kernel is not asked to end them."""
    without = supervisor._UNTIL_PARENT_ENDS.replace("ctypes.CDLL(None)", "if 0: ctypes")
    patch.setattr(supervisor, "_UNTIL_PARENT_ENDS", without)
    run = TESTS.subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        module = "kvplane.integrations.ray.supervisor"
        if module in command[-1]:
            planted = f"import {module} as s\ns._UNTIL_PARENT_ENDS = {without!r}\n"
            command = [*command[:-1], planted + command[-1]]
        return run(command, **options)

    patch.setattr(TESTS.subprocess, "Popen", popen)


def the_useless_go_on(patch: pytest.MonkeyPatch) -> None:
    """A data plane that nobody can plan for stays."""
    patch.setattr(supervisor, "_ENOUGH", 1_000_000)


def one_doubt_is_enough(patch: pytest.MonkeyPatch) -> None:
    """What a data plane holds is given up for one look at a moment between two addresses."""
    patch.setattr(supervisor, "_ENOUGH", 1)


def refuses_two_control_planes() -> None:
    with pytest.raises(TESTS.InvalidRequestError):
        FleetShape(num_control_planes=2)


PROGRAMS = TESTS.test_programs_take_what_they_are_started_with
USELESS = TESTS.test_a_process_that_is_of_no_use_is_started_again
NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    shards_have_the_same_index: PROGRAMS,
    control_planes_take_any_port: PROGRAMS,
    several_need_no_election: refuses_two_control_planes,
    servers_outlive_their_actors: TESTS.test_a_process_does_not_outlive_its_supervisors_process,
    the_useless_go_on: USELESS,
    one_doubt_is_enough: USELESS,
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_a_fleet_on_ray_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        NOTICED_BY[fault]()
