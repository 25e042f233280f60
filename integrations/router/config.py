"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from kvplane.errors import InvalidRequestError
from kvplane.serving.config import check_address, is_loopback
from kvplane.serving.limits.open_requests import share_of_one
from kvplane.serving.observability.logs import FORMATS, LEVELS
from kvplane.serving.settings import setting
from kvplane.transport.tls import Tls

from .picker import HIT_BIAS, TOKENS_PER_S


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Send requests of OpenAI's clients to the engine that has computed their prompts first."""

    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Engines": (
            *("engine", "tokenizer", "engine_ca", "engine_key_file", "engine_timeout_s"),
            *("check_interval_s", "tokens_per_s", "hit_bias"),
        ),
        "The server": (
            *("bind", "port_file", "api_keys_file", "tls_certificate", "tls_key"),
            *("insecure", "max_requests", "max_body_bytes", "max_received_bytes"),
        ),
        "The control plane": (
            *("control_plane", "namespace", "control_plane_tls", "control_plane_ca"),
            *("control_plane_certificate", "control_plane_key", "control_plane_name"),
            "control_plane_token_file",
        ),
    }
    engine: str = setting(
        help="Engines, URL=POOL, with commas between: where each serves OpenAI's paths, and the"
        " pool that it uses, as in http://127.0.0.1:8001=pool-0,http://127.0.0.1:8002=pool-1.",
    )
    tokenizer: Path | None = setting(
        None,
        help="The model's folder: prompts are read by its tokenizer and chat template. Without one"
        " cached prefixes are found for prompts of token ids alone.",
    )
    bind: str = setting(
        "127.0.0.1:8080", help="Address to serve HTTP on, host:port; port 0 picks a free one."
    )
    port_file: Path | None = setting(None, help="File to write the HTTP port to, once it serves.")
    api_keys_file: Path | None = setting(
        None,
        help="File of the keys that clients may have, one on each line; none: no key is asked.",
    )
    engine_key_file: Path | None = setting(
        None, help="File of the key for engines; none: the client's key is passed on."
    )
    engine_ca: Path | None = setting(
        None, help="PEM file of the authority that signs engines' certificates; none: the system's."
    )
    tls_certificate: Path | None = setting(
        None, help="PEM file of the certificate to serve HTTPS with."
    )
    tls_key: Path | None = setting(None, help="PEM file of that certificate's key.")
    insecure: bool = setting(
        False, help="Serve in the clear on an address that other machines can reach."
    )
    max_requests: int = setting(
        1024, unit="requests", minimum=1, help="Most requests open at one time."
    )
    max_body_bytes: int = setting(
        1 << 20, unit="bytes", minimum=1024, maximum=1 << 30, help="Largest request accepted."
    )
    max_received_bytes: int = setting(
        1 << 28,
        unit="bytes",
        minimum=1024,
        help="Most bytes, in all, of requests that no engine has begun to answer.",
    )
    engine_timeout_s: float = setting(
        600.0, unit="s", minimum=0.1, help="How long an engine that answers may send nothing."
    )
    check_interval_s: float = setting(
        2.0,
        unit="s",
        minimum=0.05,
        maximum=3600,
        help="How often engines are asked for their models.",
    )
    tokens_per_s: float = setting(
        TOKENS_PER_S,
        unit="tokens/s",
        minimum=0.001,
        help="How fast an engine computes prompts, until that was measured.",
    )
    hit_bias: float = setting(
        HIT_BIAS,
        minimum=0,
        maximum=10,
        help="How much more than its own time a hit is worth when engines are busy; 0: no more.",
    )
    control_plane: str = setting(
        "127.0.0.1:50051",
        help="Addresses host:port, with commas, of all control planes that may lead, or"
        " dns:///host:port.",
    )
    namespace: str = setting("", help="Namespace of the engines' prefixes.")
    control_plane_tls: bool = setting(False, help="Reach the control plane over TLS.")
    control_plane_ca: Path | None = setting(
        None,
        help="PEM file of the authority that signs the control plane's certificate; none means"
        " the authorities that gRPC ships with.",
    )
    control_plane_certificate: Path | None = setting(
        None, help="PEM file of the certificate that names this router to the control plane."
    )
    control_plane_key: Path | None = setting(None, help="PEM file of the certificate's key.")
    control_plane_name: str = setting(
        "",
        help="Name that the control plane's certificate must have, where it is not the host of"
        " --control-plane.",
    )
    control_plane_token_file: Path | None = setting(
        None, help="File with the bearer token that names this router to the control plane."
    )
    log_level: str = setting("info", choices=LEVELS, help="Least severe log level written.")
    log_format: str = setting("text", help="How a line of the log is written.", choices=FORMATS)

    def __post_init__(self) -> None:
        for address in self.control_plane.split(","):
            check_address(address.removeprefix("dns:///"), "control_plane")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidRequestError("must be given with --tls-key", field="tls_certificate")
        check_address(self.bind, "bind")
        if self.tls_certificate is None and not self.insecure and not is_loopback(self.bind):
            raise InvalidRequestError(
                f"{self.bind} can be reached from other machines: give --tls-certificate and "
                "--tls-key, or --insecure",
                field="bind",
            )
        if self.api_keys_file is not None and not self.api_keys():
            raise InvalidRequestError("has no keys", field="api_keys_file")
        if share_of_one(self.max_received_bytes, len(self.api_keys())) < self.max_body_bytes:
            raise InvalidRequestError(
                "must leave one client room for --max-body-bytes", field="max_received_bytes"
            )
        if self.engine_key_file is not None and len(self.engine_key().split()) != 1:
            raise InvalidRequestError("must have one key", field="engine_key_file")
        self.pools()

    def pools(self) -> dict[str, str]:
        """Return the pool of each engine, by the engine's URL. Raises InvalidRequestError."""
        pools: dict[str, str] = {}
        for entry in self.engine.split(","):
            url, _, pool = entry.strip().rpartition("=")
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or not pool:
                raise InvalidRequestError(f"must be URL=POOL, is {entry!r}", field="engine")
            if url.rstrip("/") in pools:
                raise InvalidRequestError(f"has {url} twice", field="engine")
            pools[url.rstrip("/")] = pool
        return pools

    def api_keys(self) -> tuple[str, ...]:
        """Read the keys that clients may have; none when no key is asked. Raises
        InvalidRequestError when the file cannot be read.
        """
        if self.api_keys_file is None:
            return ()
        return tuple(dict.fromkeys(_read(self.api_keys_file, "api_keys_file").split()))

    def engine_key(self) -> str:
        """Read the key to show to engines; empty for the client's. Raises InvalidRequestError."""
        if self.engine_key_file is None:
            return ""
        return _read(self.engine_key_file, "engine_key_file").strip()

    @property
    def control_tls(self) -> Tls | None:
        """How to reach the control plane; None for plain text."""
        if not self.control_plane_tls:
            return None
        return Tls(
            ca_file=self.control_plane_ca,
            cert_file=self.control_plane_certificate,
            key_file=self.control_plane_key,
            server_name=self.control_plane_name,
            token_file=self.control_plane_token_file,
        )


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot be read: {error}", field=field) from error
