"""The block store and prefix index of kvplane's control plane, called with columns."""

from kvplane_blocks._native import (
    ColumnError,
    Pool,
    Rebuild,
    chained_hash,
    prompt_hashes,
    root_hash,
)

__all__ = ["ColumnError", "Pool", "Rebuild", "chained_hash", "prompt_hashes", "root_hash"]
