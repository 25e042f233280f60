"""Lists planted faults, or tries some of them.

python -m tests.mutants --list
python -m tests.mutants NAME... (a fault, an area, or area/fault)
"""

from __future__ import annotations

import argparse
import sys

import pytest

from tests.mutants.fault import ON_PUSH, Fault, all_faults


def row(key: str, fault: Fault) -> str:
    """Return a fault's area, name, tier, file and what must notice it."""
    area, name = key.split("/", 1)
    tier = "push" if key in ON_PUSH.values() else "nightly"
    by = fault.killed_by if isinstance(fault.killed_by, str) else repr(fault.killed_by)
    return "\t".join(
        (area, name, tier, fault.places[0][0], f"{by} -k {fault.only!r}" if fault.only else by)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="every fault, a line each")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which faults to try")
    arguments = parser.parse_args()
    faults = all_faults()
    if arguments.list or not arguments.names:
        sys.stdout.write("".join(f"{row(key, fault)}\n" for key, fault in faults.items()))
        return 0
    keys = []
    for name in arguments.names:
        found = [key for key in faults if name in (key, *key.split("/", 1))]
        if not found:
            parser.error(f"no fault and no area is called {name!r}")
        keys += found
    here = "tests/mutants/test_mutants.py::test_a_fault_is_noticed"
    return int(pytest.main(["-n", "0", "-v", *(f"{here}[{key}]" for key in dict.fromkeys(keys))]))


if __name__ == "__main__":
    sys.exit(main())
