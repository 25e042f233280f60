"""A client's certificates, and its channel to a server."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvplane.errors import InvalidRequestError
from kvplane.process import check_process
from kvplane.transport.renewed import load_authorities, server_context
from kvplane.wire.protocol import CHANNEL_OPTIONS, FOLLOWER_OPTIONS


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS options of a client, as PEM files. A certificate, with its key, identifies the client by
    its name.

    ``ca_file``: the authority that signs the server's certificate; None means gRPC's own list.
    ``server_name``: the name that the certificate must have when it is not the target's.
    ``token_file``: has the bearer token that identifies the client; read again for each call.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""
    token_file: Path | None = None

    @property
    def files(self) -> tuple[Path | None, ...]:
        """Return the files that a channel is opened with."""
        return self.ca_file, self.cert_file, self.key_file


def credentials_of(tls: Tls) -> grpc.ChannelCredentials:
    """Read the files of ``tls`` as a channel's credentials. Raises InvalidRequestError naming the
    option at fault.
    """
    if (tls.cert_file is None) != (tls.key_file is None):
        missing = "tls.cert_file" if tls.cert_file is None else "tls.key_file"
        raise InvalidRequestError(
            "is missing: a certificate and its key are needed together", field=missing
        )
    if tls.cert_file is not None and tls.key_file is not None:
        try:
            server_context(tls.cert_file, tls.key_file)
        except OSError as error:
            raise InvalidRequestError(
                f"is no certificate of tls.key_file: {error}", field="tls.cert_file"
            ) from error
    authorities = _read(tls.ca_file, "tls.ca_file")
    if tls.ca_file is not None:
        try:
            load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls.ca_file)
        except OSError as error:
            raise InvalidRequestError(str(error), field="tls.ca_file") from error
    channel = grpc.ssl_channel_credentials(
        root_certificates=authorities,
        private_key=_read(tls.key_file, "tls.key_file"),
        certificate_chain=_read(tls.cert_file, "tls.cert_file"),
    )
    if tls.token_file is None:
        return channel
    _read(tls.token_file, "tls.token_file")
    calls = grpc.metadata_call_credentials(_TokenFile(tls.token_file))
    return grpc.composite_channel_credentials(channel, calls)


class _TokenFile(grpc.AuthMetadataPlugin):
    """Adds the token that the file holds when a call begins to the call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        try:
            token = self._path.read_text().strip()
        except (OSError, ValueError) as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {token}"),), None)


def open_channel(
    target: str, tls: Tls | None, *, health_of: str = "", numbers: str = ""
) -> grpc.aio.Channel:
    """Open a channel to ``target``, without TLS when ``tls`` is None: "host:port", several of them
    with commas, or "dns:///host:port" for all addresses of a name. Of several, calls go round robin
    to those where the service ``health_of`` is SERVING; where it is empty, to all that answer.
    ``numbers``: what ``resolved`` returned for the target; empty to wait for a resolver here.

    Raises InvalidRequestError naming ``target`` or a field of ``tls``, and in a process that was
    forked from one that has opened a channel.
    """
    check_process()
    hosts = [each.rpartition(":")[0] for each in target.split(",")]
    if not all(hosts):
        raise InvalidRequestError(f"must be host:port, is {target!r}", field="target")
    options: dict[str, int | str] = dict(CHANNEL_OPTIONS)
    if len(hosts) > 1 or target.startswith("dns:"):
        options |= dict(FOLLOWER_OPTIONS if health_of else ())
        options["grpc.service_config"] = _by_turns(health_of)
    if len(hosts) > 1:
        if tls is not None and not tls.server_name and len(set(hosts)) > 1:
            raise InvalidRequestError(
                "must be given for several hosts: a name that all their certificates have",
                field="tls.server_name",
            )
        target = numbers or resolved(target)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=[*options.items()])
    name = tls.server_name or (hosts[0] if len(hosts) > 1 else "")
    if name:
        options["grpc.ssl_target_name_override"] = name
    return grpc.aio.secure_channel(target, credentials_of(tls), options=[*options.items()])


def _by_turns(health_of: str) -> str:
    """Return a service config for round robin, in which gRPC watches the servers' health."""
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if health_of:
        config["healthCheckConfig"] = {"serviceName": health_of}
    return json.dumps(config)


def resolved(targets: str) -> str:
    """Resolve several hosts: gRPC takes several addresses only as numbers, of one family. It
    resolves a single one itself. Waits for the resolver. Raises InvalidRequestError.
    """
    if "," not in targets:
        return targets
    numbers = []
    for target in targets.split(","):
        host, _, port = target.rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"{target!r} has no address: {error}", field="target"
            ) from error
        numbers.append({int(family): str(at[0]) for family, *_, at in reversed(infos)})
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if all(family in each for each in numbers):
            ports = [target.rpartition(":")[2] for target in targets.split(",")]
            shape = "{}:{}" if scheme == "ipv4" else "[{}]:{}"
            listed = (
                shape.format(each[family], port) for each, port in zip(numbers, ports, strict=True)
            )
            return f"{scheme}:{','.join(listed)}"
    raise InvalidRequestError(f"{targets!r} have no family of addresses in common", field="target")


def _read(path: Path | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot be read: {error}", field=field) from error
