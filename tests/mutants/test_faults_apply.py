"""Faults that are planted at night in the sources of kvplane_blocks still fit them."""

from __future__ import annotations

from tests.helpers.native.native_programs import SOURCES
from tests.helpers.patched_faults import load


def test_what_a_fault_replaces_is_once_in_its_file() -> None:
    mutants = load("mutants/blocks/block_mutants.py")
    fuzzed = load("fuzz/test_fuzz_blocks.py")
    places = {name: (f.file, f.old) for name, f in (mutants.FAULTS | mutants.GROUPED).items()}
    places |= {name: (f.file, f.right) for name, f in fuzzed.FAULTS.items()}
    stale = {
        name: file
        for name, (file, right) in places.items()
        if (SOURCES / file).read_text().count(right) != 1
    }
    assert not stale
