"""The nightly run tries every planted fault. A push tries only those in ``ON_PUSH``, at least one
for each invariant of ``docs/architecture.md`` but the first.

On each push the exhaustive search in ``tests/exhaustive`` finds planted faults of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ON_PUSH = {
    "nobody writes a shared or published block": (
        ("test_data_mutants.py", "published_write_allowed"),
        ("test_late_layer_mutants.py", "published_blocks_are_written, bound"),
        ("test_pass_mutants.py", "a_layer_of_another_pass_runs"),
    ),
    "publish after write": (("test_data_mutants.py", "receipt_given_early"),),
    "reuse after quiet": (("test_data_mutants.py", "fenced_ordinals_forgotten"),),
    "all or nothing": (("test_data_mutants.py", "refused_plans_not_undone"),),
    "exact prefixes": (("test_conformance_mutants.py", "namespaces_are_not_kept_apart"),),
    "three answers": (("test_core_mutants.py", "headroom_in_an_empty_pool"),),
    "stale references are refused": (
        ("test_data_mutants.py", "verification_skipped"),
        ("test_data_mutants.py", "generation_unchecked"),
        ("test_planes_mutants.py", "epoch_order_ignored"),
    ),
    "retry is safe": (("test_core_mutants.py", "duplicates_run_again"),),
    "soft state": (("test_withdrawal_mutants.py", "the_last_blocks_are_left_out"),),
    "one answer": (("test_kernel_mutants.py", "bits_depend_on_the_batch"),),
    "a lease is renewed by messages": (("test_core_mutants.py", "leases_never_end"),),
    "only whom it concerns": (("test_planes_mutants.py", "tenants_not_cleared"),),
    "who waits is served": (("test_admission_mutants.py", "the_head_is_passed"),),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    faults = {place for places in ON_PUSH.values() for place in places}
    here = [item for item in items if HERE in item.path.parents]
    found = set()
    for item in here:
        place = (item.path.name, item.name.partition("[")[2].removesuffix("]"))
        if place in faults:
            found.add(place)
        elif item.path.name != "test_faults_apply.py":
            item.add_marker(pytest.mark.nightly)
    whole = {item.path.name for item in here} if not any("::" in arg for arg in config.args) else ()
    lost = sorted(place for place in faults - found if place[0] in whole)
    if lost:
        raise pytest.UsageError(f"ON_PUSH names planted faults that do not exist: {lost}")
