"""Settings that several programs share: classes that each program puts its own together from.

The engine reads its settings before gRPC may be imported, so what needs gRPC is imported later.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from kvplane.errors import InvalidRequestError
from kvplane.layout import BLOCK_SIZES, FLOAT_BYTES, KV_BYTES
from kvplane.serving.limits.open_requests import share_of_one
from kvplane.serving.observability.logs import FORMATS, LEVELS
from kvplane.serving.settings import Settings, setting

if TYPE_CHECKING:
    from kvplane.serving.certificates import ServerTls
    from kvplane.serving.observability.metrics_endpoint import MetricsAccess
    from kvplane.transport.tls import Tls

ANY_HOST: Final = ("0.0.0.0", "[::]", "::")
"""Host names that stand for all addresses of a machine."""
_SHIFTS: Final = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    """Settings of a program's log."""

    HEADING: ClassVar[str] = "The log"

    log_level: str = setting("info", help="Least severe log level written.", choices=LEVELS)
    log_format: str = setting("text", help="How a line of the log is written.", choices=FORMATS)


@dataclass(frozen=True, kw_only=True)
class OwnCertificate(Settings):
    """Settings of the certificate by which the planes and their callers know a process."""

    HEADING: ClassVar[str] = "TLS"

    tls_cert: Path | None = setting(None, help="PEM file of this process's certificate.")
    tls_key: Path | None = setting(None, help="PEM file of the key of --tls-cert.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError("must be given with --tls-key", field="tls_cert")


@dataclass(frozen=True, kw_only=True)
class ListenerSettings(LogSettings):
    """Settings of anything that serves on an address."""

    HEADING: ClassVar[str] = "The server"
    FAMILY: ClassVar[str] = "tls"
    """The settings of the server's certificate have names that begin with this."""

    bind: str = setting(help="Address to serve on, host:port; port 0 picks a free one.")
    port_file: Path | None = setting(None, help="File to write the port to, once it serves.")
    max_received_bytes: int = setting(
        1 << 30,
        help="Unanswered requests, of all clients. One alone may have a share of them, which"
        " docs/security.md explains.",
        unit="bytes",
        minimum=4096,
    )
    insecure: bool = setting(
        False, help="Serve in the clear on an address that other machines can reach."
    )
    grace_s: float = setting(
        5.0,
        help="Time that open calls and requests have to end when the program stops.",
        unit="s",
        minimum=0,
        maximum=3600,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.bind, "bind")
        self.check_safe(self.bind, "bind")

    @property
    def certificate(self) -> tuple[Path, Path] | tuple[None, None]:
        """The PEM files of the certificate to serve with, and of its key; None without TLS."""
        return getattr(self, f"{self.FAMILY}_cert"), getattr(self, f"{self.FAMILY}_key")

    def check_safe(self, address: str, field: str) -> None:
        """Raise InvalidRequestError if others could eavesdrop on what is served at the address."""
        if self.certificate[0] is None and not self.insecure and not is_loopback(address):
            raise InvalidRequestError(
                f"{address} can be reached from other machines: give --{self.FAMILY}-cert and "
                f"--{self.FAMILY}-key, or --insecure",
                field=field,
            )


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(ListenerSettings):
    """Settings of a server that has /metrics on a port of its own."""

    HEADING: ClassVar[str] = "Metrics"

    metrics_port: int = setting(
        help="Port of /metrics, /healthz and /ready; 0 picks a free one, -1 is off.",
        minimum=-1,
        maximum=65_535,
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metrics_tls and self.certificate[0] is None:
            raise InvalidRequestError(f"needs --{self.FAMILY}-cert too", field="metrics_tls")
        host = self.metrics_host or self.bind.rpartition(":")[0]
        is_served = self.metrics_port >= 0 and not self.insecure
        if is_served and not self.metrics_tls and not is_loopback(f"{host}:0"):
            raise InvalidRequestError(
                f"/metrics on {host} can be reached from other machines: give --metrics-tls, "
                "another --metrics-host, --metrics-port -1, or --insecure",
                field="metrics_host",
            )

    @property
    def metrics_access(self) -> MetricsAccess:
        """Return the access rules of /metrics. Raises InvalidRequestError for a malformed login
        file.
        """
        from kvplane.serving.observability.metrics_endpoint import MetricsAccess, read_login

        file = self.metrics_login_file
        certificate, key = self.certificate if self.metrics_tls else (None, None)
        return MetricsAccess(
            certificate=certificate,
            key=key,
            login=None if file is None else read_login(file),
        )


@dataclass(frozen=True, kw_only=True)
class HttpServerSettings(MetricsSettings):
    """Settings of a server for OpenAI's clients."""

    FAMILY: ClassVar[str] = "https"

    https_cert: Path | None = setting(None, help="PEM file of the certificate for HTTPS.")
    https_key: Path | None = setting(None, help="PEM file of the key of --https-cert.")
    max_received_bytes: int = 1 << 28
    metrics_port: int = -1
    api_keys_file: Path | None = setting(
        None,
        help="File of the keys that clients may have, one on each line; none: no key is asked.",
    )
    max_requests: int = setting(
        256, unit="requests", minimum=1, help="Most requests open at one time."
    )
    max_connections: int = setting(
        0,
        help="Most connections open at one time; 0 for as many as the limit of open files allows.",
        unit="connections",
        minimum=0,
    )
    max_body_bytes: int = setting(
        1 << 20, unit="bytes", minimum=1024, maximum=1 << 30, help="Largest request accepted."
    )
    idle_timeout_s: float = setting(
        5.0,
        help="How long a connection may be idle between requests: longer than a load balancer's.",
        unit="s",
        minimum=3,
        maximum=86_400,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.https_cert is None) != (self.https_key is None):
            raise InvalidRequestError("must be given with --https-key", field="https_cert")
        if self.api_keys_file is not None and not self.api_keys():
            raise InvalidRequestError("has no keys", field="api_keys_file")
        if share_of_one(self.max_received_bytes, len(self.api_keys())) < self.max_body_bytes:
            raise InvalidRequestError(
                "must leave one client room for --max-body-bytes", field="max_received_bytes"
            )

    def api_keys(self) -> tuple[str, ...]:
        """Return the keys of which clients must have one; none where no key is needed. Raises
        InvalidRequestError when the file cannot be read.
        """
        if self.api_keys_file is None:
            return ()
        return tuple(dict.fromkeys(read_text(self.api_keys_file, "api_keys_file").split()))


@dataclass(frozen=True, kw_only=True)
class ServerSettings(MetricsSettings, OwnCertificate):
    """Settings of a plane's gRPC server; each plane gives ``bind`` and ``metrics_port`` defaults.

    Raises InvalidRequestError for a malformed bind address, and for incomplete sets of TLS files.
    """

    advertise: str = setting(
        "", help="Address for others to connect to, host:port; empty means the one bound."
    )
    tls_client_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs clients' certificates. Clients must then present"
        " one; to the control plane its common name is their tenant.",
    )
    access_file: Path | None = setting(
        None,
        help="TOML file of callers and their roles, read again when it changes; without one,"
        " everybody may do everything. See docs/security.md.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advertise:
            check_address(self.advertise, "advertise")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidRequestError("needs --tls-cert too", field="tls_client_ca")

    @property
    def knows_callers(self) -> bool:
        """Return whether callers must identify themselves."""
        return self.access_file is not None or self.tls_client_ca is not None

    @property
    def server_tls(self) -> ServerTls | None:
        """The certificate files to serve with; None without TLS."""
        from kvplane.serving.certificates import ServerTls

        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)


@dataclass(frozen=True, kw_only=True)
class PlanesSettings(Settings):
    """Settings of a program that calls the planes: where they are, and how it knows them."""

    HEADING: ClassVar[str] = "The planes"

    control_plane: str = setting(
        "127.0.0.1:50051",
        help="Addresses host:port, with commas, of all control planes that may lead, or"
        " dns:///host:port.",
        shared=True,
    )
    tls: bool = setting(False, help="Reach the planes over TLS.")
    tls_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs the planes' certificates; none means the"
        " authorities that gRPC ships with.",
    )
    tls_name: str = setting(
        "", help="Name that the planes' certificates must have, where it is not their host's."
    )
    token_file: Path | None = setting(
        None, help="File with the bearer token that names this process to the planes."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.control_plane.split(","):
            check_address(address.removeprefix("dns:///"), "control_plane")

    def tls_with(self, certificate: Path | None, key: Path | None, name: str) -> Tls:
        """Return the TLS options to call a plane as the holder of ``certificate``. ``name``: of the
        plane's certificate, where it is not the host's; or empty.
        """
        from kvplane.transport.tls import Tls

        return Tls(self.tls_ca, certificate, key, name, self.token_file)


@dataclass(frozen=True, kw_only=True)
class ClientTls(PlanesSettings, OwnCertificate):
    """Settings of a client of the planes, which may have a certificate of its own."""

    @property
    def client_tls(self) -> Tls | None:
        """The TLS options to call the planes with; None for plain text. Any of them asks for it."""
        from kvplane.transport.tls import Tls

        given = self.tls_with(self.tls_cert, self.tls_key, self.tls_name)
        return given if self.tls or given != Tls() else None


@dataclass(frozen=True, kw_only=True)
class BlockSettings(Settings):
    """Settings of a layout that is made of a model."""

    HEADING: ClassVar[str] = "The layout"

    block_size_tokens: int = setting(
        16,
        help=f"Token slots in a block: one of {BLOCK_SIZES}.",
        unit="tokens",
        minimum=BLOCK_SIZES[0],
        maximum=BLOCK_SIZES[-1],
    )
    latent: bool = setting(
        True,
        help="Keep the latents of a model with multi-head latent attention (MLA), where the kernels"
        " serve them; --no-latent keeps its keys and values, which take more memory.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size_tokens not in BLOCK_SIZES:
            raise InvalidRequestError(f"must be one of {BLOCK_SIZES}", field="block_size_tokens")


@dataclass(frozen=True, kw_only=True)
class LayoutSettings(BlockSettings):
    """Settings of a layout whose types are chosen here."""

    dtype: str = setting(
        "auto",
        help="Type of queries, keys and values; auto takes the checkpoint's.",
        choices=("auto", *FLOAT_BYTES),
    )
    kv_dtype: str = setting(
        "",
        help="Type of stored keys and values; empty means the same as --dtype. A model's checkpoint"
        " may have scales for an 8-bit type.",
        choices=("", *KV_BYTES),
    )


@dataclass(frozen=True, kw_only=True)
class ThreadSettings(Settings):
    """Settings of the processor's use."""

    HEADING: ClassVar[str] = "The processor"

    num_threads: int = setting(
        0,
        help="Threads that compute; 0 for as many as torch takes.",
        unit="threads",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class PoolSettings(BlockSettings):
    """Settings of a pool, and of its blocks in this process."""

    HEADING: ClassVar[str] = "The pool"

    pool_id: str = setting("default", help="The pool's name at the control plane.")
    num_device_blocks: int = setting(
        0,
        help="Blocks of the device tier of each layer group without an attention window, of which"
        " the others get shares; 0 for as many as the free memory allows.",
        unit="blocks",
        minimum=0,
    )
    num_host_blocks: int = setting(
        0,
        help="Blocks of the host tier, to which sequences are swapped out, in the same way; 0 for"
        " none.",
        unit="blocks",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.pool_id) <= 128:
            raise InvalidRequestError("must be 1 to 128 characters", field="pool_id")


def memory_of(text: str) -> int | float:
    """Parse the setting ``memory``: "8GiB" as bytes, an int; "50%" as a share, a float up to 1.
    Raises InvalidRequestError.
    """
    if found := re.fullmatch(r"([0-9]{1,15})(|B|[KMGT]iB)", text):
        return int(found[1]) << _SHIFTS[found[2][:1]]
    found = re.fullmatch(r"([0-9]{1,3}(\.[0-9]{1,15})?)%", text)
    if found and 0 < float(found[1]) <= 100:
        return float(found[1]) / 100
    raise InvalidRequestError("must be bytes, as in 8GiB, or a share, as in 50%", field="memory")


def read_text(path: Path, field: str) -> str:
    """Read a small text file that a setting names. Raises InvalidRequestError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot be read: {error}", field=field) from error


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
    if re.fullmatch(r"[0-9a-fA-F]*:[0-9a-fA-F:.]*", host):
        raise InvalidRequestError("must have an IPv6 address in brackets", field=field)
