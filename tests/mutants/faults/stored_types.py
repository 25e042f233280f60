"""Faults in how a tile of 8-bit numbers is searched for NaN."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.machines import CpuModule

FILE = "csrc/cpu/row_ops/row_ops_stored.h"
TESTS = CpuModule(("tests/kernels/test_oracle_values.py",), "test_a_nan_in_a_tile")

FAULTS = (
    Fault("codes_of_an_odd_last_unit_not_searched", FILE, "codes.add(last);", "", TESTS),
    Fault(
        "codes_of_two_units_not_searched",
        FILE,
        "codes.add(load_as<ByteVector>(rows[t] + u * kUnitBytes));",
        "",
        TESTS,
    ),
)
