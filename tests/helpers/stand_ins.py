"""Stand-ins of packages that are not installed where the tests run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType


def stand_in(modules: Mapping[str, str]) -> None:
    """Make modules of their text, by name, with the packages that they are in. What is installed,
    or on ``PYTHONPATH``, is left as it is.
    """
    if importlib.util.find_spec(next(iter(modules)).partition(".")[0]) is not None:
        return
    for name, text in modules.items():
        module = sys.modules[name] = ModuleType(name)
        exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
        while name := name.rpartition(".")[0]:
            sys.modules.setdefault(name, ModuleType(name))
