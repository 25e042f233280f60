"""A client's certificates, and its channel to a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from kvplane.errors import InvalidRequestError
from kvplane.wire.protocol import CHANNEL_OPTIONS


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files. With a certificate and its key the client is who the certificate names.

    ``ca_file``: the authority that signs the server's certificate; None means gRPC's own list.
    ``server_name``: the name that the certificate must have when it is not the target's.
    ``token_file``: has the bearer token that says who the client is; read again for each call.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""
    token_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidRequestError naming the option at fault."""
        if (self.cert_file is None) != (self.key_file is None):
            missing = "tls.cert_file" if self.cert_file is None else "tls.key_file"
            raise InvalidRequestError(
                "is missing: a certificate and its key are needed together", field=missing
            )
        channel = grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file, "tls.ca_file"),
            private_key=_read(self.key_file, "tls.key_file"),
            certificate_chain=_read(self.cert_file, "tls.cert_file"),
        )
        if self.token_file is None:
            return channel
        _read(self.token_file, "tls.token_file")
        calls = grpc.metadata_call_credentials(_TokenFile(self.token_file))
        return grpc.composite_channel_credentials(channel, calls)


class _TokenFile(grpc.AuthMetadataPlugin):
    """Sends the token that the file has when a call begins."""

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


def open_channel(target: str, tls: TlsOptions | None) -> grpc.aio.Channel:
    """A channel to ``target`` ("host:port"), in the clear when ``tls`` is None."""
    if ":" not in target:
        raise InvalidRequestError(f"must be host:port, is {target!r}", field="target")
    options: list[tuple[str, int | str]] = list(CHANNEL_OPTIONS)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, tls.credentials(), options=options)


def _read(path: Path | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot be read: {error}", field=field) from error
