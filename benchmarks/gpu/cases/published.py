"""Published times of other kernels, to stand beside ours of the same batch. They are of other
machines and other days; benchmarks/gpu/cases/peers.py measures peers on this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.cases.shapes import Shape


@dataclass(frozen=True)
class Published:
    """A time of one call."""

    by: str
    gpu: str
    shape: Shape
    us: float
    differs: str
    """How its conditions differ from ours."""


PUBLISHED: Final = (
    Published(
        "TileOps pull request 2136",
        "H200",
        Shape(32, 4096),
        135.0,
        "keys and values are contiguous; the batch is assumed",
    ),
    Published(
        "TileOps pull request 2132",
        "H200",
        Shape(1, 4096, 32, 4, kv_dtype="float8_e4m3fn"),
        11.7,
        "keys and values are contiguous",
    ),
)
