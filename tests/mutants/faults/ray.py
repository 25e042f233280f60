"""Faults of a fleet on Ray, which tests without Ray notice."""

from __future__ import annotations

from tests.mutants.fault import Fault

PLACEMENT = "integrations/ray/placement.py"
SUPERVISOR = "integrations/ray/supervisor.py"
TESTS = "integrations/ray/tests/test_ray_placement.py"
# What a fault does not do, it does not do later.
SOON = (TESTS, "WAIT_S = 60.0", "WAIT_S = 2.0")

FAULTS = tuple(
    Fault(name, file, old, new, f"{TESTS}::{test}", also=(SOON,))
    for name, file, old, new, test in (
        (
            "shards_have_the_same_index",
            PLACEMENT,
            '*("--shard-index", str(i), *shape.data_arguments),',
            '*("--shard-index", "0", *shape.data_arguments),',
            "test_programs_take_what_they_are_started_with",
        ),
        (  # One that starts again is elsewhere.
            "control_planes_take_any_port",
            PLACEMENT,
            "port=shape.control_port + i,",
            "port=0,",
            "test_programs_take_what_they_are_started_with",
        ),
        (  # Two control planes both lead.
            "several_need_no_election",
            PLACEMENT,
            "if self.num_control_planes > 1 and not self.election:",
            "if False:",
            "test_a_fleet_that_cannot_be_is_refused_by_the_field_at_fault",
        ),
        (  # The kernel is not asked to end them.
            "servers_outlive_their_actors",
            SUPERVISOR,
            "ctypes.CDLL(None).prctl(",
            "if 0: ctypes.CDLL(None).prctl(",
            "test_a_process_does_not_outlive_its_supervisors_process",
        ),
        (  # A data plane that nobody can plan for stays.
            "the_useless_go_on",
            SUPERVISOR,
            "_ENOUGH: Final = 2",
            "_ENOUGH: Final = 1_000_000",
            "test_a_process_that_is_of_no_use_is_started_again",
        ),
        (  # What it holds is given up for one look at a moment between two addresses.
            "one_doubt_is_enough",
            SUPERVISOR,
            "_ENOUGH: Final = 2",
            "_ENOUGH: Final = 1",
            "test_a_process_that_is_of_no_use_is_started_again",
        ),
    )
)
