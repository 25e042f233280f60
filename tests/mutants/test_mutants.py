"""Every planted fault is noticed, and is still where its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.native.native_programs import SOURCES
from tests.helpers.patched_faults import load
from tests.mutants.fault import ON_PUSH, Fault, all_faults
from tests.mutants.runner import ROOT, assert_noticed, copy_tree, texts_with

FAULTS = all_faults()
PUSHED = {key for keys in ON_PUSH.values() for key in keys}


def tests_of(fault: Fault) -> list[str]:
    """Return the ids of the tests that must notice it, without those of machines that have none."""
    if isinstance(fault.killed_by, str):
        return fault.killed_by.split(" + ")
    return list(getattr(fault.killed_by, "tests", ()))


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("mutants") / "tree")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=key, marks=[] if key in PUSHED else [pytest.mark.nightly])
        for key, fault in FAULTS.items()
    ],
)
def test_a_fault_is_noticed(fault: Fault, tree: Path) -> None:
    assert_noticed(fault, tree)


def test_a_push_tries_faults_that_exist() -> None:
    assert FAULTS.keys() >= PUSHED


def test_what_a_fault_replaces_is_once_in_its_file() -> None:
    stale = []
    for key, fault in FAULTS.items():
        try:
            texts_with(fault, ROOT)
        except (AssertionError, FileNotFoundError) as error:
            stale.append(f"{key}: {error}")
    assert not stale


def test_what_must_notice_a_fault_exists() -> None:
    lost = []
    for key, fault in FAULTS.items():
        for test in tests_of(fault):
            file, _, name = test.partition("::")
            path = ROOT / file
            function = f"def {name.partition('[')[0]}("
            if not path.exists() or (name and function not in path.read_text()):
                lost.append(f"{key}: {test}")
    assert not lost


def test_what_a_fault_of_the_fuzzer_replaces_is_once_in_its_file() -> None:
    faults = load("fuzz/test_fuzz_blocks.py").FAULTS
    assert not [
        name for name, f in faults.items() if (SOURCES / f.file).read_text().count(f.right) != 1
    ]
