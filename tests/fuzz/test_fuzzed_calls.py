"""The fuzzer calls all that kvplane_blocks offers: what is new there is not left out of it."""

from __future__ import annotations

import ast
from pathlib import Path

import kvplane_blocks
from kvplane_blocks import LayerGroup, Pool, Rebuild

FOLDER = Path(__file__).parent


def attributes(file: Path) -> set[str]:
    """Names after a dot, anywhere in the file."""
    return {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}


def test_the_fuzzer_calls_everything() -> None:
    of_classes = (set(vars(each)) for each in (LayerGroup, Pool, Rebuild))
    functions = {name for name in kvplane_blocks.__all__ if name.islower()}
    offered = {name for name in functions.union(*of_classes) if not name.startswith("_")}
    called = set[str]().union(*map(attributes, FOLDER.glob("*.py")))
    assert offered - called == set()
