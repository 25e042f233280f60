"""The settings that every server has."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvplane.errors import InvalidRequestError
from kvplane.serving.certificates import ServerTls
from kvplane.serving.observability.logs import FORMATS, LEVELS
from kvplane.serving.observability.metrics_endpoint import MetricsAccess, read_login
from kvplane.serving.server import MAX_CONNECTION_CALLS
from kvplane.serving.settings import setting

ANY_HOST: Final = ("0.0.0.0", "[::]", "::")
"""Hosts that mean all addresses of a machine."""


def bind_setting(default: str) -> Any:
    """The field ``bind`` of a ``ServingConfig``, each of which has its own default."""
    return setting(default, help="Address to serve gRPC on, host:port; port 0 picks a free one.")


def metrics_port_setting(default: int) -> Any:
    """The field ``metrics_port`` of a ``ServingConfig``, each of which has its own default."""
    return setting(
        default,
        help="Port of /metrics; 0 picks a free one, -1 is off.",
        minimum=-1,
        maximum=65_535,
    )


def max_message_setting(default: int) -> Any:
    """The field ``max_message_bytes`` of a ``ServingConfig``, each of which has its own default."""
    return setting(
        default,
        help="Largest message accepted.",
        unit="bytes",
        minimum=4096,
        maximum=2**31 - 1,
    )


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Settings of a server; a plane adds its own, and gives the first three their defaults.

    Raises InvalidRequestError for a malformed bind address, and for incomplete sets of TLS files.
    """

    bind: str
    metrics_port: int
    max_message_bytes: int
    port_file: Path | None = setting(None, help="File to write the gRPC port to, once it serves.")
    grace_s: float = setting(
        5.0,
        help="Time that calls in flight have to end when the program stops.",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    max_received_bytes: int = setting(
        1 << 30,
        help="Unanswered requests, of all callers.",
        unit="bytes",
        minimum=4096,
    )
    max_caller_received_bytes: int = setting(
        1 << 28,
        help="Unanswered requests, of one tenant, or of one connection where tenants are not known."
        " Also the limit of its large answers that it has not read.",
        unit="bytes",
        minimum=4096,
    )
    max_connection_calls: int = setting(
        MAX_CONNECTION_CALLS, help="Calls at one time on one connection.", unit="calls", minimum=1
    )
    max_connections: int = setting(
        0,
        help="Connections at one time; 0 means as many as the limit of open files allows, some left"
        " free.",
        unit="connections",
        minimum=0,
    )
    tls_certificate: Path | None = setting(None, help="PEM file of the server's certificate.")
    tls_key: Path | None = setting(None, help="PEM file of the certificate's key.")
    tls_client_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs clients' certificates. Clients must then present"
        " one; to the control plane its common name is their tenant.",
    )
    metrics_host: str = setting("", help="Host to serve /metrics on; empty means that of --bind.")
    metrics_tls: bool = setting(
        False, help="Serve /metrics over HTTPS, with the server's certificate."
    )
    metrics_login_file: Path | None = setting(
        None,
        help="File that holds USER:SHA256, the digest of the password in hex: the login for"
        " /metrics, by HTTP's basic authentication.",
    )
    access_file: Path | None = setting(
        None,
        help="TOML file of callers and their roles, read again when it changes; without one,"
        " everybody may do everything. See docs/security.md.",
    )
    insecure: bool = setting(
        False, help="Serve in the clear on an address that other machines can reach."
    )
    log_level: str = setting("info", help="Least severe log level written.", choices=LEVELS)
    log_format: str = setting("text", help="How a line of the log is written.", choices=FORMATS)

    def __post_init__(self) -> None:
        check_address(self.bind, "bind")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidRequestError("must be given with --tls-key", field="tls_certificate")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidRequestError("needs --tls-certificate too", field="tls_client_ca")
        self.check_safe(self.bind, "bind")
        if self.metrics_tls and self.tls is None:
            raise InvalidRequestError("needs --tls-certificate too", field="metrics_tls")
        host = self.metrics_host or self.bind.rpartition(":")[0]
        is_served = self.metrics_port >= 0 and not self.insecure
        if is_served and not self.metrics_tls and not is_loopback(f"{host}:0"):
            raise InvalidRequestError(
                f"/metrics on {host} can be reached from other machines: give --metrics-tls, "
                "another --metrics-host, --metrics-port -1, or --insecure",
                field="metrics_host",
            )

    def check_safe(self, address: str, field: str) -> None:
        """Raise InvalidRequestError if others could listen to what is served there."""
        if self.tls is None and not self.insecure and not is_loopback(address):
            raise InvalidRequestError(
                f"{address} can be reached from other machines: give --tls-certificate and "
                "--tls-key, or --insecure",
                field=field,
            )

    @property
    def knows_callers(self) -> bool:
        """Whether callers must identify themselves."""
        return self.access_file is not None or self.tls_client_ca is not None

    @property
    def metrics_access(self) -> MetricsAccess:
        """The access to /metrics. Raises InvalidRequestError for a malformed login file."""
        file = self.metrics_login_file
        return MetricsAccess(
            certificate=self.tls_certificate if self.metrics_tls else None,
            key=self.tls_key if self.metrics_tls else None,
            login=None if file is None else read_login(file),
        )

    @property
    def tls(self) -> ServerTls | None:
        """The TLS files to serve with; None for no TLS."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_certificate, self.tls_key, self.tls_client_ca)


def is_loopback(address: str) -> bool:
    """Return whether "host:port" can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or a Unix socket
        return False


def check_address(address: str, field: str) -> None:
    """Raise InvalidRequestError unless ``address`` is "host:port"."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) <= 65_535):
        raise InvalidRequestError("must be host:port", field=field)
