"""Serves the page: its files, and a stream of events with what the pools hold.

Callers are authenticated as for gRPC: by the client's certificate, or by a bearer token, which a
browser asks for as the password. With an access list the caller needs the role operator. HTTP/1.1,
GET only, one request a connection; all on the event loop, because the core must not be called from
other threads.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any, Final

from kvplane.errors import KvplaneError, NotPermittedError, UnauthenticatedError
from kvplane.serving.callers.access import ROLES, AccessList, Caller
from kvplane.serving.certificates import ServerTls
from kvplane.serving.listener import BoundedListener
from kvplane.serving.observability.logs import frames_of
from kvplane.transport.renewed import renewed_context

_LOGGER: Final = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5
"""Shortest time between two events of a stream, in seconds."""
_MAX_CONNECTIONS: Final = 32
_MAX_HEAD_BYTES: Final = 16_384
_HEAD_TIMEOUT_S: Final = 10.0
_SEND_TIMEOUT_S: Final = 10.0
_IDLE_S: Final = 15.0  # after which an empty event shows that the stream is alive
_FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}

View = Callable[[str], list[dict[str, Any]]]


class PageServer:
    """The server of the status page. ``start`` binds it, on the event loop of the core."""

    def __init__(
        self, view: View, access: AccessList, plane: Mapping[str, Any], hosts: Iterable[str] = ()
    ) -> None:
        """``view`` returns the pools as a tenant may see them. ``plane``: facts about the process.
        ``hosts``: names, besides localhost, by which a browser without credentials may ask.
        """
        self._hosts = {"localhost", *hosts}
        self._view = view
        self._access = access
        self._plane = plane
        self._views: dict[str, tuple[float, str]] = {}  # when made and as JSON, by tenant
        self._connections: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}  # no request yet, the oldest first
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int, tls: ServerTls | None) -> None:
        """Start to serve; port 0 picks a free one. Raises OSError when it cannot bind."""
        context = tls and renewed_context(tls.certificate, tls.key, tls.client_ca)
        self._server = await asyncio.start_server(
            self._connected,
            sock=BoundedListener(host.strip("[]"), port, 2 * _MAX_CONNECTIONS),
            limit=_MAX_HEAD_BYTES,
            ssl=context,
            ssl_handshake_timeout=None if tls is None else _HEAD_TIMEOUT_S,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop serving, and end all event streams."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            is_full = len(self._connections) > _MAX_CONNECTIONS
            if is_full and self._silent:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                oldest.cancel()  # it gives way
                is_full = False
            if is_full:
                await _answer(writer, "503 Service Unavailable", b"too many connections\n")
            else:
                self._silent[task] = None
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_TIMEOUT_S)
                del self._silent[task]
                await self._serve(head, reader, writer)
        except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError):
            pass  # a browser that left, or bytes that are not HTTP
        except asyncio.CancelledError:
            pass  # by `stop`; the loop would log it as a fault of this callback
        except Exception as error:  # a bug: it must not reach the browser
            _LOGGER.error("page failed error=%s", frames_of(error))
        finally:
            self._connections.discard(task)
            self._silent.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _serve(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if method != "GET":
            await _answer(writer, "405 Method Not Allowed", b"only GET\n")
            return
        if not self._is_ours(headers.get("host", "")) and self._access.is_open:
            await _answer(writer, "421 Misdirected Request", b"ask by address, or --page-hosts\n")
            return
        try:
            caller = self._caller(headers, writer)
        except KvplaneError as error:
            denied = isinstance(error, NotPermittedError)
            status = "403 Forbidden" if denied else "401 Unauthorized"
            ask = {} if denied else {"WWW-Authenticate": 'Basic realm="kvplane", charset="UTF-8"'}
            await _answer(writer, status, f"{error}\n".encode(), headers=ask)
            return
        if path == "/events":
            await self._send_events(reader, writer, caller.tenant)
        elif path in _FILES:
            name, kind = _FILES[path]
            await _answer(writer, "200 OK", (files(__package__) / name).read_bytes(), kind)
        else:
            await _answer(writer, "404 Not Found", b"not found\n")

    def _is_ours(self, host: str) -> bool:
        """Return whether a request's Host header is an address or one of our names. Another may be
        one that an attacker's page has pointed here, so that the browser lets that page read the
        answer.
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        try:
            return name in self._hosts or bool(ipaddress.ip_address(name.strip("[]")))
        except ValueError:
            return False

    def _caller(self, headers: Mapping[str, str], writer: asyncio.StreamWriter) -> Caller:
        """Authenticate the caller. Raises UnauthenticatedError, NotPermittedError."""
        subject = (writer.get_extra_info("peercert") or {}).get("subject", ())
        names = [value for part in subject for key, value in part if key == "commonName"]
        if len(names) > 1:
            raise UnauthenticatedError("the client certificate has several common names")
        name = names[0] if names else None
        caller = self._access.caller(name, _token(headers.get("authorization", "")))
        if ROLES["operator"] not in caller.roles:
            raise NotPermittedError("the page needs the role operator")
        return caller

    async def _send_events(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tenant: str
    ) -> None:
        """Send the pools' state now and whenever it has changed, until the browser leaves."""
        writer.write(_head("200 OK", {"Content-Type": "text/event-stream"}))
        last, said_s = "", time.monotonic()
        while True:
            text = self._text(tenant)
            now_s = time.monotonic()
            if text != last:
                writer.write(f"data: {text}\n\n".encode())
                last, said_s = text, now_s
            elif now_s - said_s > _IDLE_S:
                writer.write(b":\n\n")
                said_s = now_s
            await asyncio.wait_for(writer.drain(), _SEND_TIMEOUT_S)
            with contextlib.suppress(TimeoutError):
                if not await asyncio.wait_for(reader.read(1), INTERVAL_S):
                    return  # the browser has left

    def _text(self, tenant: str) -> str:
        """Return the pools' state as JSON, made at most once an interval for each tenant."""
        now_s = time.monotonic()
        made_s, text = self._views.get(tenant, (-INTERVAL_S, ""))
        if now_s - made_s >= INTERVAL_S:
            text = json.dumps({**self._plane, "pools": self._view(tenant)})
            self._views = {
                each: entry for each, entry in self._views.items() if now_s - entry[0] < _IDLE_S
            }
            self._views[tenant] = now_s, text
        return text


def _token(authorization: str) -> str | None:
    """Return the bearer token, also if a browser sends it as a password."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value
    if kind.lower() == "basic":
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    return None


def _head(status: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in (_HEADERS | dict(headers)).items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


async def _answer(
    writer: asyncio.StreamWriter,
    status: str,
    body: bytes,
    kind: str = "text/plain; charset=utf-8",
    headers: Mapping[str, str] | None = None,
) -> None:
    sizes = {"Content-Type": kind, "Content-Length": str(len(body))}
    writer.write(_head(status, sizes | dict(headers or {})) + body)
    await asyncio.wait_for(writer.drain(), _SEND_TIMEOUT_S)
