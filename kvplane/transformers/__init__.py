"""kvplane for Hugging Face transformers (from a checkout, ``pip install '.[transformers]'``). The
engine too reaches the models through this package alone.

    model.set_attn_implementation("kvplane")
    model.generate(ids, cache=PlaneCache(model))  # past_key_values before transformers 5.24

Names are imported when they are first used, so that parts that need no torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplane.transformers.cache import PlaneCache
    from kvplane.transformers.planes import PlaneSettings, close_planes

__all__ = ["PlaneCache", "PlaneSettings", "close_planes"]

_HOMES: Final = {"PlaneCache": "kvplane.transformers.cache"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvplane.transformers' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "kvplane.transformers.planes")), name)
