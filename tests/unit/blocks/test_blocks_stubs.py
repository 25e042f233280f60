"""The stub of kvplane_blocks._native names what the module holds, with the same arguments."""

from __future__ import annotations

from pathlib import Path

import kvplane_blocks
from kvplane_blocks import _native

from tests.helpers.native.native_stubs import Stub

STUB = Stub(Path(__file__).parents[3] / "csrc/blocks/kvplane_blocks/_native.pyi", _native)


def test_the_stub_and_the_package_name_what_the_module_holds() -> None:
    held = {n for n in vars(_native) if not n.startswith("_")}
    assert STUB.names() == held == set(kvplane_blocks.__all__)


def test_constants_of_the_stub_have_the_values_of_the_module() -> None:
    STUB.check_constants()


def test_functions_of_the_stub_take_the_arguments_of_the_module() -> None:
    STUB.check_functions()


def test_classes_of_the_stub_are_those_of_the_module() -> None:
    STUB.check_classes()
