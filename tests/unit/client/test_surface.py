"""What programs can rely on: the names of ``kvplane``, the members of its classes, and types that
are ours.
"""

from __future__ import annotations

import dis
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvplane
from kvplane import (
    attention_options,
    errors,
    layout,
    ops,
    prefixes,
    results,
    session,
    shard,
    sync,
    tensor,
)
from kvplane.execution import execution
from kvplane.models import hf

NAMES = {
    *("AttentionOptions", "ControlClient", "DataClient", "Execution", "KvplaneError"),
    *("LayerGroup", "Layout", "Session", "StepResult", "Tensor", "Tls", "errors"),
    *("layout_from_hf", "ops", "sync", "__version__"),
}
MAX_METHODS = 15
MEMBERS = {
    "ControlClient": {
        *("close", "find_prefix", "forget_prefixes", "get_counters", "get_pool", "get_server_info"),
        *("list_pools", "list_sequences", "list_sessions", "open_session", "retain_prefix"),
        "wait_ready",
        "watch_prefixes",
    },
    "DataClient": {"close", "get_server_info", "open"},
    "Execution": {
        *("begin", "close", "key_shape", "layer", "load_files", "read_blocks", "read_pages"),
        *("start", "write_blocks", "write_pages"),
    },
    "Session": {
        *("abort_plans", "add_receipt", "close", "detach", "get_block_table", "list_sequences"),
        *("open_execution", "readmit", "reopen", "run", "step", "submit_receipts"),
        *("take_abandoned", "validate", "wait_for_news"),
    },
}
# Properties, and what the constructor sets.
PROPERTIES = {
    "ControlClient": set(),
    "DataClient": set(),
    "Execution": {"has_run", "layers", "num_tokens", "receipts"},
    "Session": {
        *("client_name", "ended_by", "grant", "id", "incarnation", "last_number", "layout"),
        *("max_plans_in_flight", "namespace", "pool_id", "shards", "time_to_live_s"),
    },
}
# Where messages are read and written for the rest of the package: they alone may have any. Other
# constructors take them by names with an underscore.
CODECS = {"all_from_proto", "from_proto", "to_proto"}
MODULES = (attention_options, errors, hf, layout, ops, prefixes, results, session, shard, tensor)


# An array's type is not subscriptable at run time before Python 3.12.
ARRAYS = {"array": list}


def public(cls: type) -> dict[str, Any]:
    """Return the members of a class that have no underscore, its bases' too."""
    return {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}


def attributes(cls: type) -> set[str]:
    """Return the properties of a class, and what its constructor sets, without an underscore."""
    code = dis.get_instructions(cls.__init__)
    stored = {i.argval for i in code if i.opname == "STORE_ATTR" and i.argval[0] != "_"}
    return (public(cls).keys() - methods(cls) - CODECS) | stored


def methods(cls: type) -> set[str]:
    return {name for name, member in public(cls).items() if callable(member)} - CODECS


def parts(hint: Any) -> Iterator[Any]:
    """Yield a type and the types that it is made of."""
    yield hint
    for part in typing.get_args(hint):
        for each in part if isinstance(part, list) else [part]:
            yield from parts(each)


def foreign(hint: Any) -> bool:
    """Whether a type is of protobuf or gRPC."""
    module = getattr(hint, "__module__", "") or ""
    is_message = hasattr(hint, "DESCRIPTOR") or "_pb2" in module
    return is_message or module.split(".")[0] in ("grpc", "google")


def classes() -> Iterator[type]:
    """The public classes: those of ``kvplane``, and of the modules with results and events."""
    for name in NAMES:
        if isinstance(getattr(kvplane, name), type):
            yield getattr(kvplane, name)
    for module in (results, prefixes, session):
        names = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
        for name in names:
            member = getattr(module, name)
            is_own = getattr(member, "__module__", "").startswith("kvplane.")
            if isinstance(member, type) and is_own and not foreign(member):
                yield member


CLASSES = sorted(set(classes()), key=lambda cls: cls.__qualname__)


def foreign_hints(owner: Any) -> list[str]:
    """Return the foreign types in a class's fields or in a function's arguments and result."""
    return [
        f"{name}: {part!r}"
        for name, hint in typing.get_type_hints(owner, localns=ARRAYS).items()
        if not name.startswith("_")
        for part in parts(hint)
        if foreign(part)
    ]


def functions(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, member in public(cls).items():
        if isinstance(inspect.getattr_static(cls, name), property):
            yield name, inspect.getattr_static(cls, name).fget
        elif name not in CODECS and inspect.isroutine(member):
            yield name, member
    yield "__init__", cls.__init__


def too_wide(cls: type) -> list[str]:
    """Return what is public of a class and refers to protobuf or gRPC."""
    faults = [f"{cls.__name__}.{fault}" for fault in foreign_hints(cls)]
    for name, function in functions(cls):
        if isinstance(function, types.FunctionType | types.MethodType):
            faults += [f"{cls.__name__}.{name}: {fault}" for fault in foreign_hints(function)]
    return faults


def test_the_package_has_these_names() -> None:
    assert set(dir(kvplane)) == NAMES
    assert len(NAMES) == 16
    assert {name for name in NAMES if getattr(kvplane, name) is not None} == NAMES


@pytest.mark.parametrize("name", MEMBERS)
def test_a_class_has_these_members(name: str) -> None:
    cls = getattr(kvplane, name)
    assert methods(cls) == MEMBERS[name]
    assert attributes(cls) == PROPERTIES[name]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_has_few_methods(cls: type) -> None:
    assert len(methods(cls)) <= MAX_METHODS


def test_the_blocking_client_has_the_same_four_classes() -> None:
    assert set(sync.__all__) == {"ControlClient", "DataClient", "Execution", "Session"}


@pytest.mark.parametrize("name", sync.__all__)
def test_the_blocking_client_has_the_same_calls(name: str) -> None:
    blocking, original = getattr(sync, name), getattr(kvplane, name)
    assert methods(blocking) == methods(original)
    for method in methods(blocking):
        mine, other = getattr(blocking, method), getattr(original, method)
        assert mine.__doc__ == other.__doc__
        ours, theirs = inspect.signature(mine), inspect.signature(other)
        assert [*ours.parameters.values()][1:] == [*theirs.parameters.values()][1:], method
    assert attributes(original) == blocking.__annotations__.keys()
    if name in ("ControlClient", "DataClient"):
        ours, theirs = (inspect.signature(cls) for cls in (blocking, original))
        assert ours.parameters == theirs.parameters


@pytest.mark.parametrize(
    "cls",
    [*CLASSES, *(getattr(sync, name) for name in sync.__all__)],
    ids=lambda cls: f"{cls.__module__}.{cls.__name__}",
)
def test_no_message_and_nothing_of_grpc_is_public(cls: type) -> None:
    assert too_wide(cls) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_function_takes_or_returns_a_message(module: types.ModuleType) -> None:
    faults = [
        f"{name}: {fault}"
        for name, function in vars(module).items()
        if isinstance(function, types.FunctionType) and name[0] != "_"
        if function.__module__ == module.__name__
        for fault in foreign_hints(function)
    ]
    assert faults == []


def test_a_message_in_an_annotation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvplane.wire.v1.types_pb2 import SignedPayload

    def planted(self: Any, plans: list[SignedPayload] | None) -> None: ...

    planted.__annotations__["plans"] = list[SignedPayload] | None
    monkeypatch.setattr(execution.Execution, "planted", planted, raising=False)
    assert len(too_wide(execution.Execution)) == 1
