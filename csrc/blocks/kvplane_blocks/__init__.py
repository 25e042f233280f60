"""The block store and prefix index of kvplane's control plane, called with columns."""

from kvplane_blocks import _native
from kvplane_blocks._native import *  # noqa: F403

__all__ = [name for name in dir(_native) if not name.startswith("_")]
