"""Settings of the control plane."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from control_plane.planning.model import CoreConfig
from kvplane.errors import InvalidRequestError
from kvplane.protocol import MAX_MESSAGE_BYTES
from kvplane.serving.logs import LEVELS
from kvplane.serving.server import ServerTls
from kvplane.serving.settings import setting

PROGRAM: Final = "control_plane"
_CORE = CoreConfig()


@dataclass(frozen=True)
class ControlPlaneConfig:
    """Serve names: block tables, reference counts and the prefix index of any number of pools."""

    bind: str = setting(
        "127.0.0.1:50051", help="Address to serve gRPC on, host:port; port 0 picks a free one."
    )
    metrics_port: int = setting(
        9101,
        help="Port of /metrics, on the same host; 0 picks a free one, -1 is off.",
        minimum=-1,
        maximum=65_535,
    )
    port_file: Path | None = setting(None, help="File to write the gRPC port to, once it serves.")
    lease_s: float = setting(
        _CORE.lease_s,
        help="How long a session lives when no message renews it.",
        unit="s",
        minimum=0.1,
        maximum=86_400,
    )
    max_plans_in_flight: int = setting(
        _CORE.max_plans_in_flight,
        help="Plans of a session that may be unreceipted at one time.",
        unit="plans",
        minimum=1,
        maximum=64,
    )
    watermark: float = setting(
        _CORE.watermark,
        help="Share of a pool's device blocks that admissions leave free.",
        unit="fraction",
        minimum=0.0,
        maximum=0.9,
    )
    max_sessions: int = setting(
        _CORE.max_sessions, help="Sessions open at one time.", unit="sessions", minimum=1
    )
    max_sequences: int = setting(
        _CORE.max_sequences, help="Live sequences of a session.", unit="sequences", minimum=1
    )
    max_operations: int = setting(
        _CORE.max_operations, help="Operations in a step.", unit="operations", minimum=1
    )
    heartbeat_s: float = setting(
        5.0,
        help="Interval of a data plane's heartbeats; it counts as gone after three without one.",
        unit="s",
        minimum=0.05,
        maximum=3600,
    )
    grace_s: float = setting(
        5.0,
        help="Time that calls in flight have to end when the program is told to stop.",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    incarnation: int = setting(
        0,
        help="This process's life, above that of any control plane before it; 0 takes the clock's"
        " nanoseconds.",
        minimum=0,
        maximum=2**63 - 1,
    )
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        help="Largest message taken or sent.",
        unit="bytes",
        minimum=4096,
        maximum=2**31 - 1,
    )
    tls_certificate: Path | None = setting(None, help="PEM file of the server's certificate.")
    tls_key: Path | None = setting(None, help="PEM file of the certificate's key.")
    tls_client_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs clients' certificates. Clients must then show"
        " one, and its common name is their tenant.",
    )
    log_level: str = setting("info", help="Least severe log level written.", choices=LEVELS)

    def __post_init__(self) -> None:
        host, colon, port = self.bind.rpartition(":")
        if not (host and colon and port.isdecimal() and int(port) <= 65_535):
            raise InvalidRequestError("must be host:port", field="bind")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidRequestError("needs --tls-key beside it", field="tls_certificate")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidRequestError("needs --tls-certificate beside it", field="tls_client_ca")

    @property
    def core(self) -> CoreConfig:
        """The part that the core needs."""
        return CoreConfig(
            lease_s=self.lease_s,
            max_plans_in_flight=self.max_plans_in_flight,
            watermark=self.watermark,
            max_operations=self.max_operations,
            max_sequences=self.max_sequences,
            max_sessions=self.max_sessions,
        )

    @property
    def tls(self) -> ServerTls | None:
        """How to serve TLS; None means in the clear."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_certificate, self.tls_key, self.tls_client_ca)
