"""How the client's objects, which live on an event loop, are used from threads that have none.

A ``Portal`` wraps one of them. Its methods are made from the asynchronous ones, so they have the
same names, parameters, types and docstrings: there is one client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kvplane.sync.loop_thread import LoopThread

Wrapped = TypeVar("Wrapped")
Result = TypeVar("Result")
Other = TypeVar("Other")
Given = ParamSpec("Given")


@functools.cache
def loop() -> LoopThread:
    """The loop of all portals of this process."""
    return LoopThread("kvplane-sync")


class Portal(Generic[Wrapped]):
    """An object of the asynchronous client. Attributes that a subclass declares are its own."""

    def __init__(self, make: Callable[[], Wrapped]) -> None:
        """``make`` is called on the loop, to which gRPC binds what it makes."""
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
    """``method`` as one of the portal, which returns when it is done."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return loop().run(method(portal._wrapped, *args, **kwargs))

    return call


def wrapping(
    method: Callable[Concatenate[Wrapped, Given], Coroutine[Any, Any, Result]],
    wrap: Callable[[Result], Other],
) -> Callable[Concatenate[Portal[Wrapped], Given], Other]:
    """As ``blocking``, with the result wrapped in turn."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Other:
        return wrap(loop().run(method(portal._wrapped, *args, **kwargs)))

    return call


def immediate(
    method: Callable[Concatenate[Wrapped, Given], Result],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """A method that does not wait, called on the loop, whose objects are not to be touched from
    other threads.
    """

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return loop().call(lambda: method(portal._wrapped, *args, **kwargs))

    return call


def in_this_thread(
    method: Callable[Concatenate[Wrapped, Given], Result],
) -> Callable[Concatenate[Portal[Wrapped], Given], Result]:
    """A method that is meant for the calling thread, whatever loop there is."""

    @functools.wraps(method)
    def call(portal: Portal[Wrapped], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return method(portal._wrapped, *args, **kwargs)

    return call
