"""The stubs of the native modules name what the modules hold, with the same arguments.

The emulator's module stands in for ``_cuda``: both are csrc/cuda_bindings.cpp.
"""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path
from types import ModuleType

import kvplane_kernels
import pytest
from emulated_build import emulated_module
from kvplane_kernels import _native

STUBS = Path(__file__).parents[2] / "csrc" / "kvplane_kernels"
OF_THE_EMULATOR = {
    "set_seed",
    "num_launches",
    "set_host_memory_is_mapped",
    "set_shared_bytes_of_block",
    "set_driver_version",
}
_ARGUMENT = re.compile(r"(?:^|, )(\w+): ")


def native_module(name: str) -> ModuleType:
    return _native if name == "_native" else emulated_module()


def stub_of(name: str) -> list[ast.stmt]:
    return ast.parse((STUBS / f"{name}.pyi").read_text()).body


def argument_names(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg != "self"]


def signature(function: object) -> tuple[bool, list[str], str]:
    """Of a function of pybind11, from the first line of its docstring: whether all its arguments
    are keyword-only, their names, and the type of its result.
    """
    line = (function.__doc__ or "").strip().splitlines()[0]
    found = re.fullmatch(r"\w+\((?P<arguments>.*)\) -> (?P<result>.+)", line)
    assert found is not None, line
    arguments = found["arguments"].removeprefix("self: ")
    by_keyword = arguments.startswith("*, ")
    names = _ARGUMENT.findall(arguments.removeprefix("*, "))
    return by_keyword, names, found["result"]


@pytest.mark.parametrize("name", ("_native", "_cuda"))
def test_a_stub_names_what_its_module_holds(name: str) -> None:
    module = native_module(name)
    names = {ast.unparse(n.target) for n in stub_of(name) if isinstance(n, ast.AnnAssign)}
    names |= {n.name for n in stub_of(name) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    held = {n for n in vars(module) if not n.startswith("__")}
    assert names == held - (OF_THE_EMULATOR if name == "_cuda" else set())


@pytest.mark.parametrize("name", ("_native", "_cuda"))
def test_functions_of_a_stub_take_the_arguments_of_the_module(name: str) -> None:
    module = native_module(name)
    functions = [n for n in stub_of(name) if isinstance(n, ast.FunctionDef)]
    assert len(functions) >= 6
    for stub in functions:
        by_keyword, names, result = signature(getattr(module, stub.name))
        assert names == argument_names(stub), stub.name
        assert by_keyword == bool(stub.args.kwonlyargs), stub.name
        assert stub.returns is not None and result == ast.unparse(stub.returns), stub.name


@pytest.mark.parametrize("name", ("_native", "_cuda"))
def test_classes_of_a_stub_are_those_of_the_module(name: str) -> None:
    module = native_module(name)
    for stub in (n for n in stub_of(name) if isinstance(n, ast.ClassDef)):
        held = getattr(module, stub.name)
        if [ast.unparse(base) for base in stub.bases] == [Enum.__name__]:
            members = {
                n.targets[0].id: ast.literal_eval(n.value)  # type: ignore[attr-defined]
                for n in stub.body
                if isinstance(n, ast.Assign)
            }
            assert members == {key: int(value) for key, value in held.__members__.items()}
        else:
            (init,) = (n for n in stub.body if isinstance(n, ast.FunctionDef))
            _, names, _ = signature(held.__init__)
            assert [n for n in names if n != "self"] == argument_names(init)


def test_the_package_gives_the_native_module_whole() -> None:
    public = {n for n in vars(_native) if not n.startswith("_")}
    assert public <= set(kvplane_kernels.__all__)
