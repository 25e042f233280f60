"""Draws docstrings of the product for a reader to explain: ``python -m scripts.sample_docstrings
--seed N``. Somebody who has seen nothing else should be able to say what each thing does.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = ("control_plane", "data_plane", "kvplane", "engine")
_DESCRIBED: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each class and function of a module that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _DESCRIBED) and (text := ast.get_docstring(node)):
            yield f"{path.relative_to(ROOT)}: {node.name}", text


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description="Draw docstrings for a reader to explain.")
    parser.add_argument("--seed", type=int, required=True, help="chooses which are drawn")
    parser.add_argument("--number", type=int, default=20, help="how many are drawn")
    arguments = parser.parse_args()
    paths = sorted(
        path for part in PARTS for path in (ROOT / part).rglob("*.py") if "_pb2" not in path.name
    )
    found = [each for path in paths for each in docstrings(path)]
    for i, (name, text) in enumerate(random.Random(arguments.seed).sample(found, arguments.number)):
        print(f"{i + 1}. {name}\n{text}\n")


if __name__ == "__main__":
    main()
