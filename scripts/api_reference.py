"""Writes the reference of the Python API to build/api/ from the docstrings, and checks its links.

make api
"""

from __future__ import annotations

import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pdoc

import kvplane

ROOT = Path(__file__).resolve().parent.parent
# Not for callers: stubs, programs, and code that servers and engines share.
LEFT_OUT = ("v1", "plane", "cli", "ray", "serving", "transformers", "__main__")
# What these packages offer is all in their ``__all__``: PlaneCache, LLM, Executor and others.
OFFERED = ("kvplane.transformers", "engine", "data_plane")


def modules() -> list[str]:
    """Return the names of the reference's modules."""
    found = [info.name for info in pkgutil.walk_packages(kvplane.__path__, "kvplane.")]
    of_client = (name for name in found if name.split(".")[1] not in LEFT_OUT)
    return ["kvplane", *of_client, *OFFERED]


def broken_links(folder: Path) -> list[str]:
    """Return links from pages of ``folder`` to missing files or anchors."""
    faults = []
    for page in sorted(folder.rglob("*.html")):
        for target in re.findall(r'href="([^"$]+)"', page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, place = unquote(target).partition("#")
            there = page.parent / name if name else page
            if not there.exists() or (
                place and there.is_file() and f'id="{place}"' not in there.read_text()
            ):
                faults.append(f"{page.relative_to(folder)}: {target}")
    return faults


def main(out: Path) -> int:
    """Write the reference. Return the exit code, which is 1 when a link leads nowhere."""
    for module in map(import_module, OFFERED):
        vars(module).update({name: getattr(module, name) for name in module.__all__})
    pdoc.pdoc(*modules(), output_directory=out)
    faults = broken_links(out)
    print(*faults, f"{len(modules())} modules, {len(faults)} broken links: {out}", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(ROOT / "build" / "api"))
