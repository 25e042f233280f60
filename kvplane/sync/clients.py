"""Portals through which other threads use the client's classes, which live on an event loop.

A ``Portal`` wraps one object. Its methods are made from the asynchronous ones, so they have the
same names, parameters, types and docstrings: there is one client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar

from kvplane.clients import control_client, data_client, execution, sharded_execution
from kvplane.errors import KvplaneError
from kvplane.layout import Layout
from kvplane.prefixes import PrefixEvent
from kvplane.session import session as sessions
from kvplane.sync.loop_thread import LoopThread
from kvplane.transport.local.connection import LocalConnection
from kvplane.transport.tls import Tls
from kvplane.wire.v1.types_pb2 import SessionRef, ShardInfo, SignedPayload

Wrapped = TypeVar("Wrapped")
Result = TypeVar("Result")
Other = TypeVar("Other")
Given = ParamSpec("Given")


@functools.cache
def loop() -> LoopThread:
    """Return the loop of all portals of this process."""
    return LoopThread("kvplane-sync")


class Portal(Generic[Wrapped]):
    """An object of the asynchronous client. Attributes that a subclass declares are its own."""

    def __init__(self, make: Callable[[], Wrapped]) -> None:
        """``make`` is called on the loop, to which gRPC binds the object."""
        self._wrapped = loop().call(make)

    if not TYPE_CHECKING:  # a type checker goes by the declarations

        def __getattr__(self, name: str) -> Any:
            if name not in type(self).__annotations__:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(self._wrapped, name)

    def __enter__(self) -> Self:
        loop().run(self._wrapped.__aenter__())  # type: ignore[attr-defined]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop().run(self._wrapped.__aexit__(kind, error, traceback))  # type: ignore[attr-defined]


def blocking(
    method: Callable[Concatenate[Wrapped, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """Make a portal's method of ``method``, which returns when it is done."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return loop().run(method(portal._wrapped, *args, **kwargs))

    return call


def wrapping(
    method: Callable[Concatenate[Wrapped, Given], Coroutine[Any, Any, Result]],
    wrap: Callable[[Result], Other],
) -> Callable[Concatenate[Portal[Wrapped], Given], Other]:
    """``blocking``, with the result wrapped in turn."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Other:
        return wrap(loop().run(method(portal._wrapped, *args, **kwargs)))

    return call


def immediate(
    method: Callable[Concatenate[Wrapped, Given], Result],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """Make a portal's method of one that does not wait. It is called on the loop, because other
    threads must not touch the loop's objects.
    """

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return loop().call(lambda: method(portal._wrapped, *args, **kwargs))

    return call


def in_this_thread(
    method: Callable[Concatenate[Wrapped, Given], Result],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """Make a portal's method of one that runs in the calling thread, not on the loop."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return method(portal._wrapped, *args, **kwargs)

    return call


class Session(Portal[sessions.Session]):
    """A ``kvplane.Session``, made by ``ControlClient.open_session``."""

    ref: SessionRef
    id: int
    incarnation: int
    pool_id: str
    client_name: str
    namespace: str
    layout: Layout
    grant: SignedPayload
    shards: tuple[ShardInfo, ...]
    num_device_blocks: int
    num_host_blocks: int
    max_plans_in_flight: int
    time_to_live_s: float
    last_number: int
    ended_by: KvplaneError | None

    step = blocking(sessions.Session.step)
    run = blocking(sessions.Session.run)
    add_receipt = immediate(sessions.Session.add_receipt)
    submit_receipts = blocking(sessions.Session.submit_receipts)
    abort_plans = blocking(sessions.Session.abort_plans)
    readmit = blocking(sessions.Session.readmit)
    take_abandoned = immediate(sessions.Session.take_abandoned)
    wait_for_news = blocking(sessions.Session.wait_for_news)
    check = blocking(sessions.Session.check)
    block_table = blocking(sessions.Session.block_table)
    describe_sequence = blocking(sessions.Session.describe_sequence)
    close = blocking(sessions.Session.close)
    detach = blocking(sessions.Session.detach)

    @functools.wraps(sessions.Session.reopen)
    def reopen(self, *, timeout_s: float = 60.0) -> Session:
        return _session(loop().run(self._wrapped.reopen(timeout_s=timeout_s)))


def _session(opened: sessions.Session) -> Session:
    return Session(lambda: opened)


class ControlClient(Portal[control_client.ControlClient]):
    """A ``kvplane.ControlClient``, with its parameters."""

    def __init__(self, target: str, *, tls: Tls | None = None, timeout_s: float = 10.0) -> None:
        super().__init__(lambda: control_client.ControlClient(target, tls=tls, timeout_s=timeout_s))

    get_server_info = blocking(control_client.ControlClient.get_server_info)
    list_pools = blocking(control_client.ControlClient.list_pools)
    get_pool = blocking(control_client.ControlClient.get_pool)
    get_counters = blocking(control_client.ControlClient.get_counters)
    list_sessions = blocking(control_client.ControlClient.list_sessions)
    wait_ready = blocking(control_client.ControlClient.wait_ready)
    find_prefix = blocking(control_client.ControlClient.find_prefix)
    retain_prefix = blocking(control_client.ControlClient.retain_prefix)
    forget_prefixes = blocking(control_client.ControlClient.forget_prefixes)
    open_session = wrapping(control_client.ControlClient.open_session, _session)
    close = blocking(control_client.ControlClient.close)

    @functools.wraps(control_client.ControlClient.watch_prefixes)
    def watch_prefixes(
        self, pool_id: str, namespace: str = "", *, timeout_s: float | None = None
    ) -> Generator[PrefixEvent, None, None]:
        events = loop().call(
            lambda: self._wrapped.watch_prefixes(pool_id, namespace, timeout_s=timeout_s)
        )
        try:
            while True:
                try:
                    yield loop().run(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            loop().run(events.aclose())


async def _next(events: Any) -> PrefixEvent:
    event: PrefixEvent = await anext(events)
    return event


class Execution(Portal[execution.Execution]):
    """A ``kvplane.Execution``, made by ``DataClient.open``."""

    layers: list[int]
    receipt: SignedPayload | None
    local: LocalConnection | None
    call_now: Never  # a blocking caller has ``layer_now``

    connect = blocking(execution.Execution.connect)
    start = blocking(execution.Execution.start)
    begin = blocking(execution.Execution.begin)
    layer = blocking(execution.Execution.layer)
    begin_now = in_this_thread(execution.Execution.begin_now)
    layer_now = in_this_thread(execution.Execution.layer_now)
    share_now = in_this_thread(execution.Execution.share_now)
    note_not_shared = in_this_thread(execution.Execution.note_not_shared)
    leave = immediate(execution.Execution.leave)
    close = blocking(execution.Execution.close)


def _execution(opened: execution.Execution) -> Execution:
    return Execution(lambda: opened)


class DataClient(Portal[data_client.DataClient]):
    """A ``kvplane.DataClient``, with its parameters."""

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            lambda: data_client.DataClient(
                target, tls=tls, timeout_s=timeout_s, shared_memory=shared_memory
            )
        )

    get_server_info = blocking(data_client.DataClient.get_server_info)
    open = wrapping(data_client.DataClient.open, _execution)
    reshape_and_cache = blocking(data_client.DataClient.reshape_and_cache)
    paged_attention = blocking(data_client.DataClient.paged_attention)
    copy_blocks = blocking(data_client.DataClient.copy_blocks)
    swap_blocks = blocking(data_client.DataClient.swap_blocks)
    read_blocks = blocking(data_client.DataClient.read_blocks)
    write_blocks = blocking(data_client.DataClient.write_blocks)
    find_file_blocks = blocking(data_client.DataClient.find_file_blocks)
    load_file_blocks = blocking(data_client.DataClient.load_file_blocks)
    close = blocking(data_client.DataClient.close)


class ShardedExecution(Portal[sharded_execution.ShardedExecution]):
    """A ``kvplane.ShardedExecution``, made by ``ShardedDataClient.open``."""

    only: execution.Execution | None
    layers: list[int]
    receipts: list[SignedPayload]
    has_run: bool

    start = blocking(sharded_execution.ShardedExecution.start)
    begin = blocking(sharded_execution.ShardedExecution.begin)
    layer = blocking(sharded_execution.ShardedExecution.layer)
    close = blocking(sharded_execution.ShardedExecution.close)


def _sharded(opened: sharded_execution.ShardedExecution) -> ShardedExecution:
    return ShardedExecution(lambda: opened)


class ShardedDataClient(Portal[sharded_execution.ShardedDataClient]):
    """A ``kvplane.ShardedDataClient``, with its parameters."""

    def __init__(
        self,
        shards: Sequence[ShardInfo],
        layout: Layout,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            lambda: sharded_execution.ShardedDataClient(
                shards, layout, tls=tls, timeout_s=timeout_s, shared_memory=shared_memory
            )
        )

    open = wrapping(sharded_execution.ShardedDataClient.open, _sharded)
    close = blocking(sharded_execution.ShardedDataClient.close)
