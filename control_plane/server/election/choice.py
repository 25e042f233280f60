"""The elector that the settings name."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from control_plane.server.election.elector import Elector
from control_plane.server.election.etcd_elector import EtcdElector
from control_plane.server.election.file_elector import FileElector
from control_plane.server.election.kubernetes_elector import KubernetesApi, KubernetesElector
from kvplane.errors import InvalidRequestError
from kvplane.transport.tls import TlsOptions


def elector_of(
    election: str, address: str, *, ttl_s: int, tls: TlsOptions | None = None
) -> Elector:
    """``election``: "file:/path", "etcd://host:port,host:port/name", or
    "kubernetes://namespace/name". ``address``: of this process. Raises InvalidRequestError of the
    field "election".
    """
    parts = urlsplit(election)
    name = parts.path.strip("/")
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return FileElector(Path(parts.path))
    if parts.scheme == "etcd" and parts.netloc and name:
        return EtcdElector(parts.netloc, name, address, ttl_s=ttl_s, tls=tls)
    if parts.scheme == "kubernetes" and parts.netloc and name:
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise InvalidRequestError(
                "this process is not in a pod: KUBERNETES_SERVICE_HOST is not set", field="election"
            )
        api = KubernetesApi.of_pod(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        return KubernetesElector(api, parts.netloc, name, address, ttl_s=ttl_s)
    raise InvalidRequestError(
        "must be file:/PATH, etcd://HOST:PORT,HOST:PORT/NAME or kubernetes://NAMESPACE/NAME",
        field="election",
    )
