"""An election among machines, by a lease in etcd, through the JSON gateway of its members.

    kvplane/NAME/leader        the leader's address, under its lease
    kvplane/NAME/incarnation   the last leader's, never removed

The leader wrote the first key while it was not there, in a transaction that also raised the second.
The lease ends TTL seconds after the leader last kept it alive, and that clock counts from when a
keep-alive that was answered was *sent*. A standby keeps a lease of its own, and holds a TCP
connection to the leader: when that ends and another is refused, the process is gone, and one
transaction puts the next leader in its place, if nobody else has. A leader reads its key whenever
it keeps its lease alive, so one that was replaced by mistake ends; it costs a change of leaders.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import time
from base64 import b64decode, b64encode
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from control_plane.server.election import RETRY_DELAY_S, Elector, has_died, next_incarnation
from kvplane.errors import InvalidRequestError

_LOGGER: Final = logging.getLogger(__name__)
_KEEP_ALIVES_PER_TTL: Final = 4
_CALL_S: Final = 1.0  # after which another member is asked; one may hang
_FAILURES: Final = (httpx2.HTTPError, TimeoutError, ValueError)


def elector_of(election: str, address: str, *, ttl_s: int) -> Elector:
    """Return the elector of "etcd://HOST:PORT,HOST:PORT/NAME". TLS is used if KVPLANE_ETCD_CA is
    set, with the files that it, KVPLANE_ETCD_CERTIFICATE and KVPLANE_ETCD_KEY name. Raises
    InvalidRequestError for the field "election" if the host or the name is missing, or a file
    cannot be used.
    """
    parts = urlsplit(election)
    name = parts.path.strip("/")
    if not parts.netloc or not name:
        raise InvalidRequestError("must be etcd://HOST:PORT,HOST:PORT/NAME", field="election")
    ca, certificate, key = (
        os.environ.get(f"KVPLANE_ETCD_{each}") for each in ("CA", "CERTIFICATE", "KEY")
    )
    context: ssl.SSLContext | None = None
    if ca:
        try:
            context = ssl.create_default_context(cafile=ca)
            if certificate or key:
                context.load_cert_chain(certificate or "", key)
        except OSError as error:
            raise InvalidRequestError(
                f"a file that KVPLANE_ETCD_CA, _CERTIFICATE or _KEY names cannot be used: {error}",
                field="election",
            ) from error
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log each keep-alive
    return EtcdElector(parts.netloc, name, address, ttl_s=ttl_s, tls=context)


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a key. ``revision``: that changed it last; 0 for a missing key. ``lease``: the
    id of the lease that it ends with.
    """

    text: str = ""
    revision: int = 0
    lease: str = ""


class EtcdElector(Elector):
    """``endpoints``: "host:port" of etcd's members, with commas. ``address``: this process's, for
    standbys; empty for none. ``ttl_s``: whole seconds; etcd may grant more. ``tls``: how members
    are reached; None for in the clear.
    """

    def __init__(
        self,
        endpoints: str,
        name: str,
        address: str,
        *,
        ttl_s: int = 5,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._ttl_s = ttl_s
        self._folder = f"kvplane/{name}/"
        self._leader_key = f"{self._folder}leader"
        self._incarnation_key = f"{self._folder}incarnation"
        scheme = "http" if tls is None else "https"
        # The first one is asked.
        self._members = deque(f"{scheme}://{each.strip()}" for each in endpoints.split(","))
        self._client = httpx2.AsyncClient(
            verify=True if tls is None else tls,
            trust_env=False,
            timeout=httpx2.Timeout(None, connect=_CALL_S),
        )
        self._lease = ""
        self._expires_s = 0.0  # as far as this process knows

    async def win(self) -> int:
        """Try until this process leads, also without etcd; return the incarnation."""
        while True:
            try:
                incarnation = await self._try_to_win()
            except _FAILURES as error:
                _LOGGER.warning("etcd: %r", error)
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            if incarnation:
                return incarnation

    async def hold(self) -> None:
        """Return when the lease has ended, or may have, or another leads."""
        wait_s = interval_s = self._ttl_s / _KEEP_ALIVES_PER_TTL
        while (left_s := self._expires_s - time.monotonic()) > 0:
            await asyncio.sleep(min(wait_s, left_s))
            wait_s = interval_s
            sent_s = time.monotonic()
            try:
                kept_s = await self._keep_alive(
                    min(interval_s, max(self._expires_s - sent_s, 0.01))
                )
            except _FAILURES as error:
                _LOGGER.warning("lease not renewed: %r", error)
                wait_s = RETRY_DELAY_S
                continue
            if kept_s <= 0:
                return
            self._expires_s = sent_s + kept_s
            if await self._is_replaced(interval_s / 2):  # renewals must not wait for it
                return

    async def resign(self) -> None:
        """Revoke the lease, and close the connections."""
        if self._lease:
            with suppress(*_FAILURES):
                await self._call("lease/revoke", {"ID": self._lease})
        await self._client.aclose()

    async def _try_to_win(self) -> int:
        """Return the incarnation, or 0 when the leader is gone and another attempt is due."""
        revision, leader, last = await self._read()
        await self._renew()
        if not leader.revision:
            return await self._take(leader, last)
        if leader.lease == self._lease:  # the answer to its transaction was lost
            return int(last.text) if last.revision == leader.revision else 0
        if await self._wait_for_end(leader, revision):
            return 0
        _LOGGER.warning("the leader at %s has died", leader.text)
        return await self._take(leader, last)

    async def _is_replaced(self, timeout_s: float) -> bool:
        """Return whether another has taken the leader's key while this process's lease lives."""
        try:
            _, leader, _ = await self._read(timeout_s)
        except _FAILURES as error:
            _LOGGER.warning("not known whether it leads: %r", error)
            return False
        return leader.lease != self._lease

    async def _take(self, before: _Value, last: _Value) -> int:
        """Write this process's key in place of ``before``. Return the incarnation, or 0 if another
        process has written its key. ``last``: the last leader's incarnation.
        """
        incarnation = next_incarnation(int(last.text or 0))
        unchanged = {self._leader_key: before, self._incarnation_key: last}
        leader = {"key": _code(self._leader_key), "value": _code(self._address)}
        counter = {"key": _code(self._incarnation_key), "value": _code(str(incarnation))}
        answer = await self._call(
            "kv/txn",
            {
                "compare": [
                    {"target": "MOD", "key": _code(key), "mod_revision": str(value.revision)}
                    for key, value in unchanged.items()
                ],
                "success": [
                    {"request_put": leader | {"lease": self._lease}},
                    {"request_put": counter},
                ],
            },
        )
        return incarnation if answer.get("succeeded") else 0

    async def _wait_for_end(self, leader: _Value, revision: int) -> bool:
        """Wait until the leader's key is another's or gone, or, then false, the leader has died.
        Keep this process's own lease meanwhile.
        """
        changed = asyncio.ensure_future(self._changed(revision + 1))
        tasks = [changed, asyncio.ensure_future(self._stay_ready())]
        if leader.text:
            tasks.append(asyncio.ensure_future(has_died(leader.text)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return changed.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stay_ready(self) -> None:
        """Keep the lease with which this process would lead."""
        while True:
            await asyncio.sleep(self._ttl_s / _KEEP_ALIVES_PER_TTL)
            await self._renew()

    async def _renew(self) -> None:
        """Keep the lease alive, or get one if there is none or it has ended."""
        sent_s = time.monotonic()
        kept_s = 0.0
        if self._expires_s > sent_s:
            kept_s = await self._keep_alive(self._ttl_s / _KEEP_ALIVES_PER_TTL)
        if kept_s <= 0:
            sent_s = time.monotonic()
            granted = await self._call("lease/grant", {"TTL": str(self._ttl_s)})
            self._lease, kept_s = granted["ID"], float(granted["TTL"])
        self._expires_s = sent_s + kept_s

    async def _changed(self, revision: int) -> None:
        """Wait until the leader's key is written or removed, at ``revision`` or later. Return now
        and then, to be called again, as a watch depends on one member.
        """
        body = {"key": _code(self._leader_key), "start_revision": str(revision)}
        url = f"{self._members[0]}/v3/watch"
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(self._ttl_s),
                self._client.stream("POST", url, json={"create_request": body}) as answers,
            ):
                async for line in answers.aiter_lines():
                    if not json.loads(line).get("result", {}).get("created"):
                        return

    async def _keep_alive(self, timeout_s: float) -> float:
        """Renew the lease; return its seconds from now, 0 when it has ended."""
        answer = await self._call("lease/keepalive", {"ID": self._lease}, timeout_s)
        return float(answer["result"].get("TTL", 0))

    async def _read(self, timeout_s: float | None = None) -> tuple[int, _Value, _Value]:
        """Return the store's revision, the leader's address and the last incarnation."""
        keys = {"key": _code(self._folder), "range_end": _code(f"{self._folder[:-1]}0")}
        answer = await self._call("kv/range", keys, timeout_s)
        values = {
            b64decode(each["key"]).decode(): _Value(
                b64decode(each.get("value", "")).decode(),
                int(each["mod_revision"]),
                each.get("lease", ""),
            )
            for each in answer.get("kvs", ())
        }
        return (
            int(answer["header"]["revision"]),
            values.get(self._leader_key, _Value()),
            values.get(self._incarnation_key, _Value()),
        )

    async def _call(
        self, method: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Ask a member. When it fails, the next call asks the next one. Numbers of 64 bits are
        strings, and keys and values in base 64.
        """
        member = self._members[0]
        if timeout_s is None:
            timeout_s = min(self._ttl_s / 2, _CALL_S)
        # The client closes a connection whose opening times out, and leaks one that is cancelled.
        phases = httpx2.Timeout(timeout_s, connect=timeout_s / 3)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._client.post(f"{member}/v3/{method}", json=body, timeout=phases)
            answer.raise_for_status()
            decoded: dict[str, Any] = answer.json()
        except _FAILURES:
            if self._members[0] == member:
                self._members.rotate(-1)
            raise
        return decoded


def _code(text: str) -> str:
    return b64encode(text.encode()).decode()
