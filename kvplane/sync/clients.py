"""Portals through which other threads use the client's classes, which live on an event loop.

A ``Portal`` wraps one object. Its methods are made from the asynchronous ones, so they have the
same names, parameters, types and docstrings: there is one client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kvplane.clients import control_client, data_client
from kvplane.errors import KvplaneError
from kvplane.execution import execution
from kvplane.layout import Layout
from kvplane.prefixes import PrefixEvent
from kvplane.results import ShardInfo, Signed
from kvplane.session import session as sessions
from kvplane.sync.loop_thread import LoopThread
from kvplane.transport.opening import Closable, Opening
from kvplane.transport.tls import Tls

Wrapped = TypeVar("Wrapped")
Result = TypeVar("Result")
Other = TypeVar("Other")
Closed = TypeVar("Closed", bound=Closable)
Given = ParamSpec("Given")


@functools.cache
def loop() -> LoopThread:
    """Return the event loop of all portals of this process, in a thread of its own."""
    return LoopThread("kvplane-sync")


class Portal(Generic[Wrapped]):
    """Lets other threads use one object of the asynchronous client. Attributes that a subclass
    declares are its own.
    """

    def __init__(self, make: Callable[[], Wrapped]) -> None:
        """``make`` creates the object. It is called on the loop, to which gRPC binds the object."""
        self._wrapped = loop().call(make)

    if not TYPE_CHECKING:  # a type checker goes by the declarations

        def __getattr__(self, name: str) -> Any:
            if name not in type(self).__annotations__:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(self._wrapped, name)

    def __enter__(self) -> Self:
        loop().run(self._wrapped.__aenter__())  # type: ignore[attr-defined]
        return self

    def __exit__(self, *exception: object) -> None:
        loop().run(self._wrapped.__aexit__(*exception))  # type: ignore[attr-defined]


def blocking(
    method: Callable[Concatenate[Wrapped, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """Make a portal's method from an asynchronous one; it blocks until the coroutine is done."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return loop().run(method(portal._wrapped, *args, **kwargs))

    return call


def opening(
    method: Callable[Concatenate[Wrapped, Given], Opening[Closed]],
    wrap: Callable[[Closed], Other],
) -> Callable[Concatenate[Portal[Wrapped], Given], Other]:
    """Make a portal's method as ``blocking`` does, and wrap its result in a portal too."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Other:
        return wrap(loop().run(_opened(method(portal._wrapped, *args, **kwargs))))

    return call


async def _opened(opening: Opening[Closed]) -> Closed:
    return await opening


def immediate(
    method: Callable[Concatenate[Wrapped, Given], Result],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """Make a portal's method from one that is not asynchronous. It is called on the loop, because
    other threads must not touch the loop's objects.
    """

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return loop().call(lambda: method(portal._wrapped, *args, **kwargs))

    return call


class Execution(Portal[execution.Execution]):
    """A blocking ``kvplane.Execution``, which a session or a ``DataClient`` opens."""

    layers: list[int]
    num_tokens: int
    receipts: list[Signed]
    has_run: bool

    start = blocking(execution.Execution.start)
    begin = blocking(execution.Execution.begin)
    layer = blocking(execution.Execution.layer)
    key_shape = immediate(execution.Execution.key_shape)
    read_blocks = blocking(execution.Execution.read_blocks)
    write_blocks = blocking(execution.Execution.write_blocks)
    read_pages = blocking(execution.Execution.read_pages)
    write_pages = blocking(execution.Execution.write_pages)
    load_files = blocking(execution.Execution.load_files)
    close = blocking(execution.Execution.close)


def _execution(opened: execution.Execution) -> Execution:
    return Execution(lambda: opened)


class Session(Portal[sessions.Session]):
    """A blocking ``kvplane.Session``, made by ``ControlClient.open_session``."""

    id: int
    incarnation: int
    pool_id: str
    client_name: str
    namespace: str
    layout: Layout
    grant: Signed
    shards: tuple[ShardInfo, ...]
    max_plans_in_flight: int
    time_to_live_s: float
    last_number: int
    ended_by: KvplaneError | None

    open_execution = opening(sessions.Session.open_execution, _execution)
    step = blocking(sessions.Session.step)
    run = blocking(sessions.Session.run)
    add_receipt = immediate(sessions.Session.add_receipt)
    submit_receipts = blocking(sessions.Session.submit_receipts)
    abort_plans = blocking(sessions.Session.abort_plans)
    readmit = blocking(sessions.Session.readmit)
    take_abandoned = immediate(sessions.Session.take_abandoned)
    wait_for_news = blocking(sessions.Session.wait_for_news)
    validate = blocking(sessions.Session.validate)
    list_sequences = blocking(sessions.Session.list_sequences)
    get_block_table = blocking(sessions.Session.get_block_table)
    close = blocking(sessions.Session.close)
    detach = blocking(sessions.Session.detach)

    @functools.wraps(sessions.Session.reopen)
    def reopen(self, *, timeout_s: float = 60.0) -> Session:
        return _session(loop().run(self._wrapped.reopen(timeout_s=timeout_s)))


def _session(opened: sessions.Session) -> Session:
    return Session(lambda: opened)


class ControlClient(Portal[control_client.ControlClient]):
    """A blocking ``kvplane.ControlClient``, with its parameters."""

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            lambda: control_client.ControlClient(
                target, tls=tls, timeout_s=timeout_s, shared_memory=shared_memory
            )
        )

    get_server_info = blocking(control_client.ControlClient.get_server_info)
    list_pools = blocking(control_client.ControlClient.list_pools)
    get_pool = blocking(control_client.ControlClient.get_pool)
    get_counters = blocking(control_client.ControlClient.get_counters)
    list_sessions = blocking(control_client.ControlClient.list_sessions)
    list_sequences = blocking(control_client.ControlClient.list_sequences)
    wait_ready = blocking(control_client.ControlClient.wait_ready)
    find_prefix = blocking(control_client.ControlClient.find_prefix)
    retain_prefix = blocking(control_client.ControlClient.retain_prefix)
    forget_prefixes = blocking(control_client.ControlClient.forget_prefixes)
    open_session = opening(control_client.ControlClient.open_session, _session)
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


class DataClient(Portal[data_client.DataClient]):
    """A blocking ``kvplane.DataClient``, with its parameters."""

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
    open = opening(data_client.DataClient.open, _execution)
    close = blocking(data_client.DataClient.close)
