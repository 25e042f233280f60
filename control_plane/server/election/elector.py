"""Elections of the control plane that leads, and of its incarnation.

    async with elector.lead() as incarnation:
        ...  # this process leads; when it no longer does, PlaneUnavailableError is raised

An election decides only which process serves. A former leader can do no harm, because data planes
refuse lower incarnations, lease or not: two leaders at a time cost a failed call, never
a wrong byte. Beyond a lease, an elector has to promise that incarnations rise.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvplane.errors import PlaneUnavailableError

RETRY_DELAY_S: Final = 0.2
_ENDING_S: Final = 0.002


class Elector(ABC):
    """One candidate (this process) in an election of the leading control plane."""

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[int]:
        """Wait until this process leads, then yield its incarnation, which is above those of
        earlier leaders.

        The body is cancelled when leadership is lost. Leaving the body lets another process lead at
        once.
        """
        incarnation = await self.win()
        body = asyncio.current_task()
        assert body is not None
        lost = False

        async def watch() -> None:
            nonlocal lost
            await self.hold()
            lost = True
            body.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield incarnation
        except asyncio.CancelledError:
            if lost and body.uncancel() == 0:
                raise PlaneUnavailableError("this control plane does not lead any more") from None
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.resign()

    @abstractmethod
    async def win(self) -> int:
        """Wait until this process leads; returns its incarnation."""

    @abstractmethod
    async def hold(self) -> None:
        """Keep the leadership; returns when it is lost, or may be."""

    @abstractmethod
    async def resign(self) -> None:
        """Give up the leadership, if this process has it, to let another lead. Does not raise."""


def next_incarnation(last: int) -> int:
    """Return an incarnation that is above ``last`` and above those of processes that took the
    clock's nanoseconds for it.
    """
    return max(last + 1, time.time_ns())


async def has_died(address: str) -> None:
    """Wait until the process that listens at ``address``, "host:port", has died: its connection
    was reset or closed, *and* another is refused. Waits forever if that cannot be determined.
    """
    host, _, port = address.rpartition(":")
    delay_s = _ENDING_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # it is ending: its port is closed after its connections
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_DELAY_S)  # or a proxy before it resets them all
            continue
        except (OSError, ValueError):
            await asyncio.sleep(RETRY_DELAY_S)
            continue
        try:
            while await reader.read(4096):
                pass
        except OSError:
            pass
        finally:
            writer.close()
