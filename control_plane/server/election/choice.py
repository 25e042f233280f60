"""The elector that the settings name."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from control_plane.server.election.elector import Elector
from control_plane.server.election.file_elector import FileElector
from control_plane.server.election.kubernetes_elector import KubernetesApi, KubernetesElector
from kvplane.errors import InvalidRequestError


def elector_of(election: str, address: str, *, ttl_s: int) -> Elector:
    """``election``: "file:/path", "kubernetes://namespace/name", or of a scheme that an installed
    package knows. ``address``: of this process. Raises InvalidRequestError of the field "election".
    """
    parts = urlsplit(election)
    name = parts.path.strip("/")
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return FileElector(Path(parts.path))
    if parts.scheme == "kubernetes" and parts.netloc and name:
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise InvalidRequestError(
                "this process is not in a pod: KUBERNETES_SERVICE_HOST is not set", field="election"
            )
        api = KubernetesApi.of_pod(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        return KubernetesElector(api, parts.netloc, name, address, ttl_s=ttl_s)
    for entry in entry_points(group="kvplane.electors", name=parts.scheme):
        elector: Elector = entry.load()(election, address, ttl_s=ttl_s)
        return elector
    raise InvalidRequestError(
        "must be file:/PATH, kubernetes://NAMESPACE/NAME or, where kvplane[etcd] is installed,"
        " etcd://HOST:PORT,HOST:PORT/NAME",
        field="election",
    )
