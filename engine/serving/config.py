"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvplane.errors import InvalidRequestError
from kvplane.serving.config import check_address, is_loopback
from kvplane.serving.limits.open_requests import share_of_one
from kvplane.serving.observability.logs import FORMATS, LEVELS
from kvplane.serving.settings import setting

from ..config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Serve a model over HTTP, as OpenAI's clients expect it."""

    HELP_GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The server": (
            *("bind", "port_file", "model_name", "api_keys_file", "tls_certificate", "tls_key"),
            *("insecure", "max_requests", "max_body_bytes", "max_received_bytes"),
        ),
        **EngineConfig.HELP_GROUPS,
    }
    bind: str = setting(
        "127.0.0.1:8000", help="Address to serve HTTP on, host:port; port 0 picks a free one."
    )
    model_name: str = setting("", help="The model's name for clients; empty: its folder's name.")
    port_file: Path | None = setting(None, help="File to write the port to, once it serves.")
    api_keys_file: Path | None = setting(
        None,
        help="File of the keys that clients may have, one on each line; none: no key is asked.",
    )
    tls_certificate: Path | None = setting(
        None, help="PEM file of the certificate to serve HTTPS with."
    )
    tls_key: Path | None = setting(None, help="PEM file of that certificate's key.")
    insecure: bool = setting(
        False, help="Serve in the clear on an address that other machines can reach."
    )
    max_requests: int = setting(
        256, unit="requests", minimum=1, help="Most requests open at one time."
    )
    max_body_bytes: int = setting(
        1 << 20, unit="bytes", minimum=1024, maximum=1 << 30, help="Largest request accepted."
    )
    max_received_bytes: int = setting(
        1 << 28,
        unit="bytes",
        minimum=1024,
        help="Most bytes of requests that have no answer yet, or whose stream has not begun.",
    )
    log_level: str = setting("info", choices=LEVELS, help="Least severe log level written.")
    log_format: str = setting("text", help="How a line of the log is written.", choices=FORMATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.bind, "bind")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidRequestError("must be given with --tls-key", field="tls_certificate")
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

    def api_keys(self) -> tuple[str, ...]:
        """Read the keys that clients may have; none when no key is asked. Raises
        InvalidRequestError when the file cannot be read.
        """
        if self.api_keys_file is None:
            return ()
        try:
            return tuple(dict.fromkeys(self.api_keys_file.read_text(encoding="utf-8").split()))
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"cannot be read: {error}", field="api_keys_file") from error

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name or self.model.resolve().name
