"""Objects that are opened by a call to a plane."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, Self, TypeVar


class Closable(Protocol):
    """An object for ``async with``."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...


Opened = TypeVar("Opened", bound=Closable)


class Opening(Generic[Opened]):
    """Gives an opened object to ``await``, and to ``async with``, which closes it at its end.

    Nothing is sent before that.
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
