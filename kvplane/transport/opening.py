"""Objects that are opened by a call to a plane."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, Self, TypeVar


class Closable(Protocol):
    """An object that ``async with`` can close."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...


Opened = TypeVar("Opened", bound=Closable)


class Opening(Generic[Opened]):
    """The opening of an object by a call: ``await`` gives it, and ``async with`` also closes it at
    its end.

    The call is not sent before that.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, Opened]]) -> None:
        self._call = call
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, None, Opened]:
        return self._call().__await__()

    async def __aenter__(self) -> Opened:
        self._opened = await self._call()
        return await self._opened.__aenter__()

    async def __aexit__(self, *exception: object) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.__aexit__(*exception)
