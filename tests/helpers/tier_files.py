"""The files of a file tier, as a test finds them in its folder."""

from __future__ import annotations

from pathlib import Path

from data_plane.files.record import HEADER_BYTES, read_header


def in_order(folder: Path) -> list[Path]:
    """Return one prompt's files, its first block first; of shards, one shard after the other."""
    keys = {path: read_header(path.read_bytes()[:HEADER_BYTES])[0] for path in _paths(folder)}
    ordered = []
    for first, key in keys.items():
        if key.parent != key.root:
            continue
        path: Path | None = first
        while path is not None:
            ordered.append(path)
            name = keys[path].name
            below = (p for p, k in keys.items() if k.parent == name and k.part == key.part)
            path = next(below, None)
    return ordered


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))
