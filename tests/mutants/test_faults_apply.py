"""Every planted fault still fits the sources, and what must notice it is still there."""

from __future__ import annotations

import importlib

from tests.helpers.native.native_programs import SOURCES
from tests.mutants.fault import ON_PUSH, Fault, all_faults
from tests.mutants.runner import ROOT, texts_with

FAULTS = all_faults()


def _noticing(fault: Fault) -> list[str]:
    """Return the ids of the tests that must notice it; some machines have none."""
    if isinstance(fault.killed_by, str):
        return fault.killed_by.split(" + ")
    return list(getattr(fault.killed_by, "tests", ()))


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
        for test in _noticing(fault):
            file, _, name = test.partition("::")
            path = ROOT / file
            function = f"def {name.partition('[')[0]}("
            if not path.exists() or (name and function not in path.read_text()):
                lost.append(f"{key}: {test}")
    assert not lost


def test_a_push_tries_faults_that_exist() -> None:
    assert set(ON_PUSH.values()) <= FAULTS.keys()


def test_what_a_fault_of_the_fuzzer_replaces_is_once_in_its_file() -> None:
    faults = importlib.import_module("tests.fuzz.test_fuzz_blocks").FAULTS
    assert not [
        name for name, f in faults.items() if (SOURCES / f.file).read_text().count(f.right) != 1
    ]
