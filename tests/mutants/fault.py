"""What a planted fault is, and where all of them are listed."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.mutants.machines import MACHINES, MACHINES_OF_TESTS, Machine

TABLES: Final = Path(__file__).parent / "faults"


@dataclass(frozen=True)
class Fault:
    """Each place, a file, ``old`` and ``new``, has ``old`` once; with ``new`` there, ``killed_by``
    must fail.

    killed_by: ids of tests, with " + " between them, or a machine. only: an expression for -k.
    timeout_s: of each test, for faults that make tests wait for ever.
    """

    name: str
    places: tuple[tuple[str, str, str], ...]
    killed_by: str | Machine
    only: str = ""
    timeout_s: int = 120


def read(table: Path) -> list[Fault]:
    """Read a table of faults. It has lines of these kinds, of which ``file`` and ``by`` hold for
    all faults after them.

    ``file PATH``: what the faults change. ``by TESTS [-k EXPRESSION] [--timeout=SECONDS]``, or a
    machine's name in place of tests, perhaps with tests after it: what must fail. ``@@ NAME``: a
    fault begins; lines as in a diff follow, but each may be a part of a line of the file. One
    without such lines has those of the fault before it, whose name is the same up to a comma or
    hyphen. ``also PATH``: a further place of the
    fault, with lines of its own. ``# TEXT``: a comment.
    """
    faults: list[Fault] = []
    file = by = ""
    hunks: list[tuple[str, list[str]]] = []
    for line in [*table.read_text().splitlines(), "@@ "]:
        word, _, rest = line.partition(" ")
        if line[:1] in ("-", "+", " "):
            hunks[-1][1].append(line)
        elif word == "also":
            hunks.append((rest, []))
        elif word in ("file", "by", "@@"):
            if hunks:
                last, places = faults[-1], _places(hunks)
                if not places:
                    alike = {re.split("[,-]", fault.name)[0] for fault in faults[-2:]}
                    assert len(alike) == 1, f"{table.name}: {last.name} has no lines"
                    places = faults[-2].places
                faults[-1] = replace(last, places=places)
                hunks = []
            if word == "file":
                file = rest
            elif word == "by":
                by = rest
            elif rest:
                faults.append(Fault(rest, (), *_killed_by(by)))
                hunks = [(file, [])]
        else:
            assert word == "#", f"{table.name}: {line}"
    return faults


def _places(hunks: list[tuple[str, list[str]]]) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (file, *("\n".join(line[1:] for line in lines if line[0] != sign) for sign in "+-"))
        for file, lines in hunks
        if lines
    )


@functools.cache
def _killed_by(words: str) -> tuple[str | Machine, str, int]:
    """Return what must fail, which of its tests, and their time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", nargs="+")
    parser.add_argument("-k", dest="only", default="")
    parser.add_argument("--timeout", type=int, default=120)
    found = parser.parse_args(shlex.split(words))
    name, *tests = found.tests
    if name in MACHINES:
        return MACHINES[name], found.only, found.timeout
    if name in MACHINES_OF_TESTS:
        return MACHINES_OF_TESTS[name](tuple(tests), found.only), "", found.timeout
    return " + ".join(found.tests), found.only, found.timeout


# A push tries these, one for each invariant of docs/internals.md; the walks' faults, of which each
# takes a minute, are tried at night.
ON_PUSH: Final[dict[str, str]] = {
    "conservation": "core/retired_blocks_are_not_counted",
    "nobody writes a shared or published block": "data/published_write_allowed",
    "publish after write": "data/receipt_given_early",
    "reuse after quiet": "data/fenced_ordinals_forgotten",
    "all or nothing": "data_tables/refused_plans_not_undone",
    "exact prefixes": "conformance/namespaces_are_not_kept_apart",
    "three answers": "core/headroom_in_an_empty_pool",
    "stale references are refused": "data/verification_skipped",
    "retry is safe": "core/duplicates_run_again",
    "soft state": "withdrawals/the_last_blocks_are_left_out",
    "one answer": "kernels/bits_depend_on_the_batch",
    "a lease is renewed by messages": "core/leases_never_end",
    "only whom it concerns": "data_tables/clearing_skipped",
    "who waits is served": "admission/the_head_is_passed",
}


@functools.cache
def all_faults() -> dict[str, Fault]:
    """Return every fault by its area, which is the name of its table, and its name."""
    found: dict[str, Fault] = {}
    for table in sorted(TABLES.glob("*.txt")):
        for fault in read(table):
            key = f"{table.stem}/{fault.name}"
            assert key not in found, f"two faults are called {key}"
            found[key] = fault
    return found
