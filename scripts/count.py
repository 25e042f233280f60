"""Hand-written lines of each part of the repository: ``python -m scripts.count``.

The product is everything that a user installs or builds: protos, both planes, native code, the
client's package and the engine. Tests, benchmarks, documents, examples and scripts are counted
apart; generated files and data are not counted.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("protos", "control_plane", "data_plane", "csrc", "kvplane", "engine")
APART: Final = ("integrations", "examples", "scripts", "deploy", "benchmarks", "tests", "docs")
_CODE: Final = {".py", ".pyi", ".proto", ".sh", ".js", ".css", ".html", ".go", ".rs"}
_NATIVE: Final = {".h", ".cpp", ".cu", ".cuh"}
_TEXT: Final = {".md", ".yml", ".yaml", ".txt"}


def part_of(path: Path) -> str | None:
    """Return the part that counts a file's lines; None for generated files, data or settings."""
    is_counted = path.suffix in _CODE | _NATIVE | _TEXT and path.name != "CMakeLists.txt"
    is_generated = "_pb2" in path.name or path.parts[:2] == ("docs", "reference")
    if is_generated or not is_counted:
        return None
    if len(path.parts) == 1:
        return "docs" if path.suffix == ".md" else None
    part = "tests" if "tests" in path.parts else path.parts[0]
    return part if part in PRODUCT + APART else None


def count(root: Path) -> Counter[str]:
    """Return lines by part, of the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    lines: Counter[str] = Counter()
    for name in listed.stdout.decode().split("\0"):
        part = part_of(Path(name)) if name else None
        if part is not None and (root / name).is_file():
            lines[part] += (root / name).read_bytes().count(b"\n")
    return lines


def main() -> None:
    """Print the table."""
    lines = count(ROOT)
    for part in PRODUCT:
        print(f"{part:14} {lines[part]:8,}")
    print(f"{'product':14} {sum(lines[part] for part in PRODUCT):8,}\n")
    for part in APART:
        print(f"{part:14} {lines[part]:8,}")


if __name__ == "__main__":
    main()
