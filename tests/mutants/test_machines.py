"""What notices faults by a build notices none in the tree as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.fault import Machine, all_faults
from tests.mutants.runner import copy_tree

MACHINES: dict[str, Machine] = {
    repr(fault.killed_by): fault.killed_by
    for fault in all_faults().values()
    if not isinstance(fault.killed_by, str)
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("sound") / "tree")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_sound_tree_passes(machine: Machine, tree: Path) -> None:
    fails, said = machine(tree)
    assert not fails, said
