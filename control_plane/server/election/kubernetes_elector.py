"""An election among pods, by a Lease of Kubernetes' coordination API.

A Lease is replaced only by a request that names the version it replaces, so of several attempts one
succeeds. Clocks are not compared: a Lease has expired when this process has not seen it change for
as long as it says. A standby also holds a TCP connection to the leader, as with etcd, and takes the
Lease over when the leader has died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from control_plane.server.election.elector import RETRY_DELAY_S, Elector, has_died, next_incarnation

_LOGGER: Final = logging.getLogger(__name__)
_RENEWALS_PER_TTL: Final = 4
_INCARNATION: Final = "kvplane/incarnation"
_ADDRESS: Final = "kvplane/address"
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONFLICT: Final = 409
_NOT_FOUND: Final = 404

Lease = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """A client of the Kubernetes API server. ``token_file`` is read again for each call, as tokens
    are replaced.
    """

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of_pod(cls, host: str, port: str) -> KubernetesApi:
        """Return a client with the pod's service account; the pod's environment has the
        arguments.
        """
        host = f"[{host}]" if ":" in host else host
        return cls(
            f"https://{host}:{port}", _SERVICE_ACCOUNT / "token", _SERVICE_ACCOUNT / "ca.crt"
        )

    def call(self, method: str, path: str, body: Lease | None, timeout_s: float) -> Lease:
        """Send a request and return its answer. Blocks. Raises urllib.error.HTTPError or
        OSError.
        """
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Content-Type", "application/json")
        if self.token_file is not None:
            request.add_header("Authorization", f"Bearer {self.token_file.read_text().strip()}")
        if body is not None:
            request.data = json.dumps(body).encode()
        context = None
        if self.ca_file is not None:
            context = ssl.create_default_context(cafile=str(self.ca_file))
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
            lease: Lease = json.load(answer)
        return lease


class KubernetesElector(Elector):
    """An election by a Lease of Kubernetes. ``address``: where standbys reach this process to see
    whether it lives, empty for nowhere.
    """

    def __init__(
        self, api: KubernetesApi, namespace: str, name: str, address: str, *, ttl_s: int = 5
    ) -> None:
        self._api = api
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._address = address
        self._ttl_s = ttl_s
        self._identity = f"{address or 'kvplane'}_{uuid.uuid4()}"
        self._lease: Lease = {}  # as this process wrote it
        self._expires_s = 0.0  # as far as this process knows

    async def win(self) -> int:
        """Try until this process leads, also while the API server cannot be reached."""
        while True:
            try:
                lease = await self._read()
                if lease is None:
                    lease = await self._send("POST", self._first())
                await self._wait_for_end(lease)
                return await self._take(lease)
            except (OSError, ValueError, KeyError) as error:
                if _status(error) != _CONFLICT:  # otherwise another was first
                    _LOGGER.warning("lease not read: %s", error)
                await asyncio.sleep(RETRY_DELAY_S)

    async def hold(self) -> None:
        """Renew the Lease until another process holds it, or may hold it."""
        interval_s = self._ttl_s / _RENEWALS_PER_TTL
        while (left_s := self._expires_s - time.monotonic()) > 0:
            await asyncio.sleep(min(interval_s, left_s))
            try:
                await self._write(self._lease)
            except (OSError, ValueError) as error:
                if _status(error) == _CONFLICT:
                    return
                _LOGGER.warning("lease not renewed: %s", error)

    async def resign(self) -> None:
        """Release the Lease, unless another process already holds it."""
        if self._lease:
            self._lease["spec"]["holderIdentity"] = ""
            try:
                await self._write(self._lease)
            except (OSError, ValueError) as error:
                _LOGGER.info("lease not released: %s", error)

    async def _wait_for_end(self, lease: Lease) -> None:
        """Wait until nobody holds the Lease, its holder has died or does not renew it."""
        dying: asyncio.Task[None] | None = None
        seen_s, version = time.monotonic(), lease["metadata"]["resourceVersion"]
        try:
            while lease["spec"].get("holderIdentity"):
                address = lease["metadata"].get("annotations", {}).get(_ADDRESS, "")
                if dying is None and address:
                    dying = asyncio.create_task(has_died(address))
                wait_s = self._ttl_s / _RENEWALS_PER_TTL
                if dying is not None:
                    await asyncio.wait([dying], timeout=wait_s)
                else:
                    await asyncio.sleep(wait_s)
                later = await self._read()
                if later is None:
                    return
                now_s = time.monotonic()
                if later["metadata"]["resourceVersion"] != version:
                    seen_s, version = now_s, later["metadata"]["resourceVersion"]
                    if later["metadata"].get("annotations", {}).get(_ADDRESS, "") != address:
                        _cancel(dying)
                        dying = None
                lease.clear()
                lease.update(later)
                is_dead = dying is not None and dying.done()
                if is_dead or now_s - seen_s >= lease["spec"]["leaseDurationSeconds"]:
                    return
        finally:
            _cancel(dying)

    async def _take(self, lease: Lease) -> int:
        """Become the Lease's holder; returns the incarnation. Raises HTTPError 409 if too late."""
        annotations = lease["metadata"].setdefault("annotations", {})
        incarnation = next_incarnation(int(annotations.get(_INCARNATION, 0)))
        annotations |= {_INCARNATION: str(incarnation), _ADDRESS: self._address}
        spec = lease["spec"]
        spec["holderIdentity"] = self._identity
        spec["leaseDurationSeconds"] = self._ttl_s
        spec["acquireTime"] = _now()
        spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
        await self._write(lease)
        return incarnation

    async def _write(self, lease: Lease) -> None:
        """Replace the version read last. The Lease's time runs from before the request."""
        sent_s = time.monotonic()
        lease["spec"]["renewTime"] = _now()
        self._lease = await self._send("PUT", lease)
        self._expires_s = sent_s + self._ttl_s

    def _first(self) -> Lease:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": {"leaseDurationSeconds": self._ttl_s, "leaseTransitions": 0},
        }

    async def _read(self) -> Lease | None:
        try:
            return await self._call("GET", f"{self._folder}/{self._name}", None)
        except urllib.error.HTTPError as error:
            if error.code == _NOT_FOUND:
                return None
            raise

    async def _send(self, method: str, lease: Lease) -> Lease:
        path = self._folder if method == "POST" else f"{self._folder}/{self._name}"
        return await self._call(method, path, lease)

    async def _call(self, method: str, path: str, body: Lease | None) -> Lease:
        return await asyncio.to_thread(self._api.call, method, path, body, self._ttl_s / 2)


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()


def _status(error: Exception) -> int:
    return error.code if isinstance(error, urllib.error.HTTPError) else 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
