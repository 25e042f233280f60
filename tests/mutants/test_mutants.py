"""Every planted fault is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.fault import ON_PUSH, Fault, all_faults
from tests.mutants.runner import assert_noticed, copy_tree

PUSHED = set(ON_PUSH.values())


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("mutants") / "tree")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=key, marks=[] if key in PUSHED else [pytest.mark.nightly])
        for key, fault in all_faults().items()
    ],
)
def test_a_fault_is_noticed(fault: Fault, tree: Path) -> None:
    assert_noticed(fault, tree)
