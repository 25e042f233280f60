"""An election among machines, by a lease in etcd.

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
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc.aio

from control_plane.server.election import RETRY_DELAY_S, Elector, has_died, next_incarnation
from kvplane.errors import InvalidRequestError
from kvplane.transport.tls import Tls, open_channel

from . import etcd_pb2 as pb

_LOGGER: Final = logging.getLogger(__name__)
_KEEP_ALIVES_PER_TTL: Final = 4
_CALL_S: Final = 1.0  # after which another member is asked; one may hang
_CHANGED: Final = 2  # Compare.target


def elector_of(election: str, address: str, *, ttl_s: int) -> Elector:
    """Return the elector of "etcd://HOST:PORT,HOST:PORT/NAME". TLS is used if KVPLANE_ETCD_CA is
    set, with the files that it, KVPLANE_ETCD_CERTIFICATE and KVPLANE_ETCD_KEY name. Raises
    InvalidRequestError for the field "election" if the host or the name is missing.
    """
    parts = urlsplit(election)
    name = parts.path.strip("/")
    if not parts.netloc or not name:
        raise InvalidRequestError("must be etcd://HOST:PORT,HOST:PORT/NAME", field="election")
    ca, certificate, key = (
        Path(path) if (path := os.environ.get(f"KVPLANE_ETCD_{each}")) else None
        for each in ("CA", "CERTIFICATE", "KEY")
    )
    tls = None if ca is None else Tls(ca, certificate, key)
    return EtcdElector(parts.netloc, name, address, ttl_s=ttl_s, tls=tls)


class EtcdElector(Elector):
    """``endpoints``: "host:port" of etcd's members, with commas. ``address``: this process's, for
    standbys; empty for none. ``ttl_s``: whole seconds; etcd may grant more.
    """

    def __init__(
        self,
        endpoints: str,
        name: str,
        address: str,
        *,
        ttl_s: int = 5,
        tls: Tls | None = None,
    ) -> None:
        self._address = address
        self._ttl_s = ttl_s
        self._leader_key = f"kvplane/{name}/leader".encode()
        self._incarnation_key = f"kvplane/{name}/incarnation".encode()
        self._channel = open_channel(endpoints, tls)
        self._lease = 0
        self._expires_s = 0.0  # as far as this process knows

    async def win(self) -> int:
        """Try until this process leads, also without etcd; return the incarnation."""
        while True:
            try:
                incarnation = await self._try_to_win()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                _LOGGER.warning("etcd: %s", _text_of(error))
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            if incarnation:
                return incarnation

    async def hold(self) -> None:
        """Return when the lease has ended, or may have, or another leads."""
        interval_s = self._ttl_s / _KEEP_ALIVES_PER_TTL
        while (left_s := self._expires_s - time.monotonic()) > 0:
            await asyncio.sleep(min(interval_s, left_s))
            sent_s = time.monotonic()
            try:
                kept_s = await self._keep_alive(
                    min(interval_s, max(self._expires_s - sent_s, 0.01))
                )
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                _LOGGER.warning("lease not renewed: %s", _text_of(error))
                continue
            if kept_s <= 0:
                return
            self._expires_s = sent_s + kept_s
            if await self._is_replaced(interval_s / 2):  # renewals must not wait for it
                return

    async def resign(self) -> None:
        """Revoke the lease, and close the channel."""
        if self._lease:
            with suppress(grpc.aio.AioRpcError):
                await self._revoke(self._lease)
        await self._channel.close()

    async def _try_to_win(self) -> int:
        """Return the incarnation, or 0 when the leader is gone and another attempt is due."""
        leader, last = await asyncio.gather(
            self._read(self._leader_key), self._read(self._incarnation_key)
        )
        await self._renew()
        if not leader.kvs:
            return await self._take(pb.KeyValue(), last)
        if self._is_ours(leader.kvs[0]):  # the answer to its transaction was lost
            is_of_it = last.kvs[0].mod_revision == leader.kvs[0].mod_revision
            return int(last.kvs[0].value) if is_of_it else 0
        if await self._wait_for_end(leader.kvs[0], leader.header.revision):
            return 0
        _LOGGER.warning("the leader at %s has died", leader.kvs[0].value.decode())
        return await self._take(leader.kvs[0], last)

    async def _is_replaced(self, timeout_s: float) -> bool:
        """Return whether another has taken the leader's key while this process's lease lives."""
        try:
            async with asyncio.timeout(timeout_s):
                leader = await self._read(self._leader_key)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            _LOGGER.warning("not known whether it leads: %s", _text_of(error))
            return False
        return not (leader.kvs and self._is_ours(leader.kvs[0]))

    def _is_ours(self, leader: pb.KeyValue) -> bool:
        return leader.lease == self._lease

    async def _take(self, before: pb.KeyValue, last: pb.RangeResponse) -> int:
        """Write this process's key in place of ``before``, empty for none. Return the incarnation,
        or 0 if another process has written its key. ``last``: the last leader's incarnation.
        """
        changed, number = (last.kvs[0].mod_revision, int(last.kvs[0].value)) if last.kvs else (0, 0)
        incarnation = next_incarnation(number)
        put = [
            pb.PutRequest(key=self._leader_key, value=self._address.encode(), lease=self._lease),
            pb.PutRequest(key=self._incarnation_key, value=str(incarnation).encode()),
        ]
        # A missing key has the revision 0.
        revisions = {self._leader_key: before.mod_revision, self._incarnation_key: changed}
        request = pb.TxnRequest(
            compare=[
                pb.Compare(target=_CHANGED, key=key, mod_revision=revision)
                for key, revision in revisions.items()
            ],
            success=[pb.RequestOp(request_put=each) for each in put],
        )
        answer = await self._call("KV/Txn", request, pb.TxnResponse)
        return incarnation if answer.succeeded else 0

    async def _wait_for_end(self, leader: pb.KeyValue, revision: int) -> bool:
        """Wait until the leader's key is another's or gone, or, then false, the leader has died.
        Keep this process's own lease meanwhile.
        """
        changed = asyncio.ensure_future(self._changed(revision + 1))
        tasks = [changed, asyncio.ensure_future(self._stay_ready())]
        if leader.value:
            tasks.append(asyncio.ensure_future(has_died(leader.value.decode())))
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
            granted = await self._call(
                "Lease/LeaseGrant", pb.LeaseGrantRequest(ttl=self._ttl_s), pb.LeaseGrantResponse
            )
            self._lease, kept_s = granted.id, granted.ttl
        self._expires_s = sent_s + kept_s

    async def _changed(self, revision: int) -> None:
        """Wait until the leader's key is written or removed, at ``revision`` or later. Return now
        and then, to be called again, as a watch depends on one member.
        """
        create = pb.WatchCreateRequest(key=self._leader_key, start_revision=revision)
        call = self._stream("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
        try:
            await call.write(pb.WatchRequest(create_request=create))
            async with asyncio.timeout(self._ttl_s):
                while (answer := await call.read()) is not grpc.aio.EOF:
                    if answer.canceled or answer.events:
                        return
        except TimeoutError:
            return
        finally:
            call.cancel()

    async def _keep_alive(self, timeout_s: float) -> float:
        """Renew the lease; return its seconds from now, 0 when it has ended."""
        call = self._stream(
            "Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
        )
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(pb.LeaseKeepAliveRequest(id=self._lease))
                answer = await call.read()
        finally:
            call.cancel()
        if answer is grpc.aio.EOF:
            raise TimeoutError
        return float(answer.ttl)

    async def _revoke(self, lease: int) -> None:
        await self._call(
            "Lease/LeaseRevoke", pb.LeaseRevokeRequest(id=lease), pb.LeaseRevokeResponse
        )

    async def _read(self, key: bytes) -> pb.RangeResponse:
        answer: pb.RangeResponse = await self._call(
            "KV/Range", pb.RangeRequest(key=key), pb.RangeResponse
        )
        return answer

    async def _call(self, method: str, request: Any, answer: Any) -> Any:
        call: Any = self._channel.unary_unary(
            f"/etcdserverpb.{method}", type(request).SerializeToString, answer.FromString
        )
        return await call(request, timeout=min(self._ttl_s / 2, _CALL_S))

    def _stream(self, method: str, request: Any, answer: Any) -> Any:
        call: Any = self._channel.stream_stream(
            f"/etcdserverpb.{method}", request.SerializeToString, answer.FromString
        )
        return call()


def _text_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return "no answer in time"
