"""A small inference engine that uses kvplane as any other client would.

Names are imported when they are first used, so that ``--help`` does not wait for torch. Imports
within the package are relative: in the wheel it is ``kvplane.engine``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .llm import LLM
    from .request import CompletionOutput, Delta, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "Delta", "RequestOutput", "SamplingParams"]

_HOMES: Final = {"LLM": ".llm"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, ".request"), __name__), name)
