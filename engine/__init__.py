"""A small inference engine that uses kvplane as any other client would.

Names are imported when they are first used, so that ``--help`` and ``demo.recall`` do not wait
for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.request import CompletionOutput, Delta, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "Delta", "RequestOutput", "SamplingParams"]

_HOMES: Final = {"LLM": "engine.llm"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "engine.request")), name)
