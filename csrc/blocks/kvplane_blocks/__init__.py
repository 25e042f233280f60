"""The metadata of a pool's blocks, in native code."""

from kvplane_blocks._native import ColumnError, Pool

__all__ = ["ColumnError", "Pool"]
