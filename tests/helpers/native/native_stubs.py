"""Compares the stub of a native module with the module: names, arguments and results."""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path
from types import ModuleType

_ARGUMENT = re.compile(r"(?:^|, )(\w+): ")


class Stub:
    """A ``.pyi`` file beside the module that it describes."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.module = module
        self._body = ast.parse(path.read_text()).body

    def names(self) -> set[str]:
        """Return the stub's public names, all of which the module must have."""
        names = {ast.unparse(n.target) for n in self._body if isinstance(n, ast.AnnAssign)}
        found = names | {n.name for n in (*self.functions(), *self._classes())}
        return {name for name in found if not name.startswith("_")}

    def functions(self) -> list[ast.FunctionDef]:
        return [n for n in self._body if isinstance(n, ast.FunctionDef)]

    def check_functions(self) -> None:
        """Check that functions take the arguments of the module's and return the same types."""
        for stub in self.functions():
            self._check_signature(stub, getattr(self.module, stub.name))

    def check_constants(self) -> None:
        """Check that constants have the values of the module's."""
        for stub in self._body:
            if isinstance(stub, ast.AnnAssign) and stub.value is not None:
                name = ast.unparse(stub.target)
                assert ast.literal_eval(stub.value) == getattr(self.module, name), name

    def check_classes(self) -> None:
        """Check that enums have the module's members, other classes its methods and properties."""
        classes = {stub.name: stub for stub in self._classes()}
        for stub in classes.values():
            if stub.name.startswith("_"):
                continue
            held = getattr(self.module, stub.name)
            if [ast.unparse(base) for base in stub.bases] == [Enum.__name__]:
                members = {
                    n.targets[0].id: ast.literal_eval(n.value)  # type: ignore[attr-defined]
                    for n in stub.body
                    if isinstance(n, ast.Assign)
                }
                assert members == {key: int(value) for key, value in held.__members__.items()}
                continue
            bases = [classes[name] for base in stub.bases if (name := ast.unparse(base)) in classes]
            bodies = [*stub.body, *(n for base in bases for n in base.body)]
            methods = [n for n in bodies if isinstance(n, ast.FunctionDef)]
            public = {n for n in vars(held) if not n.startswith("_")}
            assert {n.name for n in methods if not n.name.startswith("_")} == public, stub.name
            for method in methods:
                if not method.decorator_list:  # a property has no signature
                    self._check_signature(method, getattr(held, method.name))

    def _classes(self) -> list[ast.ClassDef]:
        return [n for n in self._body if isinstance(n, ast.ClassDef)]

    def _check_signature(self, stub: ast.FunctionDef, held: object) -> None:
        by_keyword, names, result = _signature(held)
        arguments = (*stub.args.args, *stub.args.kwonlyargs)
        assert names == [a.arg for a in arguments if a.arg != "self"], stub.name
        assert by_keyword == bool(stub.args.kwonlyargs), stub.name
        assert stub.returns is not None, stub.name
        result = result.replace(f"{self.module.__name__}.", "")
        assert result in ("object", ast.unparse(stub.returns)) or (
            set(result.split(" | ")) == self._origins(stub.returns)
        ), stub.name

    def _origins(self, result: ast.expr) -> set[str]:
        """Return the types of a union without their parameters, which pybind11 does not know."""
        if isinstance(result, ast.BinOp):
            return self._origins(result.left) | self._origins(result.right)
        if isinstance(result, ast.Subscript):
            return {ast.unparse(result.value)}
        name = ast.unparse(result)
        aliases = {
            ast.unparse(n.targets[0]): n.value for n in self._body if isinstance(n, ast.Assign)
        }
        return self._origins(aliases[name]) if name in aliases else {name}


def _signature(function: object) -> tuple[bool, list[str], str]:
    """Return a pybind11 function's signature, from the first line of its docstring: whether all its
    arguments are keyword-only, their names, and the type of its result.
    """
    line = (function.__doc__ or "").strip().splitlines()[0]
    found = re.fullmatch(r"\w+\((?P<arguments>.*)\) -> (?P<result>.+)", line)
    assert found is not None, line
    arguments = re.sub(r"^self: [^,]+(, |$)", "", found["arguments"])
    by_keyword = arguments.startswith("*, ")
    return by_keyword, _ARGUMENT.findall(arguments.removeprefix("*, ")), found["result"]
