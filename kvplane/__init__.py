"""kvplane: a paged KV cache as a pair of gRPC services, and this, the client of both.

    async with ControlClient("127.0.0.1:50051") as control, control.open_session("pool") as session:
        async with session.open_execution() as execution:
            ...

Names are imported when they are first used, so that ``kvplane.errors`` or ``kvplane.layout`` alone
do not import gRPC.
"""

from __future__ import annotations

import importlib.metadata
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

# gRPC's handlers of forks are not for asynchronous calls: with them a forked process may die by
# SIGSEGV, whether it uses gRPC or not. gRPC reads the variable when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__: str

if TYPE_CHECKING:
    from kvplane import errors, ops, sync
    from kvplane.attention_options import AttentionOptions
    from kvplane.clients.control_client import ControlClient
    from kvplane.clients.data_client import DataClient
    from kvplane.errors import KvplaneError
    from kvplane.execution.execution import Execution
    from kvplane.layout import LayerGroup, Layout
    from kvplane.models.hf import layout_from_hf
    from kvplane.results import StepResult
    from kvplane.session import Session
    from kvplane.tensor import Tensor
    from kvplane.transport.tls import Tls

__all__ = [
    "AttentionOptions",
    "ControlClient",
    "DataClient",
    "Execution",
    "KvplaneError",
    "LayerGroup",
    "Layout",
    "Session",
    "StepResult",
    "Tensor",
    "Tls",
    "errors",
    "layout_from_hf",
    "ops",
    "sync",
]

_MODULES: Final = ("errors", "ops", "sync")
_HOMES: Final = {
    "AttentionOptions": "kvplane.attention_options",
    "ControlClient": "kvplane.clients.control_client",
    "DataClient": "kvplane.clients.data_client",
    "Execution": "kvplane.execution",
    "KvplaneError": "kvplane.errors",
    "LayerGroup": "kvplane.layout",
    "Layout": "kvplane.layout",
    "Session": "kvplane.session",
    "StepResult": "kvplane.results",
    "Tensor": "kvplane.tensor",
    "Tls": "kvplane.transport.tls",
    "layout_from_hf": "kvplane.models.hf",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return import_module(f"kvplane.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvplane' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _version() -> str:
    try:
        return importlib.metadata.version("kvplane")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+unknown"
