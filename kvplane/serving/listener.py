"""A listening socket that bounds its open connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Final

_MOST_REFUSED: Final = 128


class BoundedListener(socket.socket):
    """Listens for an asyncio server. Closes connections beyond ``max_connections`` at once; silent
    ones and unfinished handshakes count towards it.
    """

    def __init__(self, host: str, port: int, max_connections: int) -> None:
        """Raises OSError when it cannot bind."""
        self._max_connections = max_connections
        self._num_open = 0
        made = socket.create_server((host, port), family=family_of(host, port))
        super().__init__(fileno=made.detach())

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError when none waits."""
        for _ in range(_MOST_REFUSED):  # then the event loop does something else first
            made, address = super().accept()
            if self._num_open < self._max_connections:
                self._num_open += 1
                return _Connection(made.detach(), self._closed_one), address
            made.close()
        raise BlockingIOError

    def _closed_one(self) -> None:
        self._num_open -= 1


class _Connection(socket.socket):
    """A socket that reports once when it is closed."""

    def __init__(self, fileno: int, on_close: Callable[[], None]) -> None:
        self._on_close: Callable[[], None] | None = on_close
        super().__init__(fileno=fileno)

    def close(self) -> None:
        super().close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def family_of(host: str, port: int) -> socket.AddressFamily:
    """Return the family to listen with: IPv4 where the host has it. Raises OSError."""
    families = {found[0] for found in socket.getaddrinfo(host, port)}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
