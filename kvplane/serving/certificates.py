"""A gRPC server's certificate, which may be replaced while it serves."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import grpc

from kvplane.transport.renewed import Renewed, server_context

# How the public key of a certificate begins in DER: its kind, and the length of its bits.
_UNUSABLE_KEYS: Final = {
    "ed25519": bytes.fromhex("06032b6570 032100"),
    "P-521": bytes.fromhex("06052b81040023 03818600"),
}


# A certificate's validity in DER, its second time: UTCTime has a year of two digits.
_ENDS: Final = re.compile(
    rb"\x30[\x1e-\x22](?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12}Z)|\x18\x0f(\d{14}Z))"
)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's PEM files. With ``client_ca`` each client must have a certificate signed by it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class ServerCertificate:
    """The certificate that a gRPC server uses. Each connection checks the files for changes;
    invalid files change nothing then.
    """

    def __init__(self, tls: ServerTls) -> None:
        """Read the files. Raises OSError for files that are invalid now."""
        self._renewed = Renewed(lambda: _read(tls), (tls.key, tls.certificate, tls.client_ca))
        self._has_clients = tls.client_ca is not None

    def ends_s(self) -> float:
        """Return when the certificate expires, in Unix time."""
        return self._renewed.get()[1]

    def credentials(self) -> grpc.ServerCredentials:
        """Make a server's credentials for one address."""
        given, _ = self._renewed.get()

        def changed() -> Any:  # or None if nothing changed, which gRPC's stubs do not allow
            nonlocal given
            present, _ = self._renewed.get()
            if present is given:
                return None
            given = present
            return present

        return grpc.dynamic_ssl_server_credentials(
            given, changed, require_client_authentication=self._has_clients
        )


def _read(tls: ServerTls) -> tuple[grpc.ServerCertificateConfiguration, float]:
    """Read the PEM files; also return when the certificate expires. Raises OSError."""
    before = _contents(tls)
    server_context(tls.certificate, tls.key, tls.client_ca)
    if _contents(tls) != before:
        raise OSError("the files are being replaced")
    key, certificate, client_ca = before
    leaf = certificate.partition(b"-----BEGIN CERTIFICATE-----")[2].partition(b"-----END")[0]
    der = base64.b64decode(leaf)
    for kind, public_key in _UNUSABLE_KEYS.items():
        if public_key in der:
            raise OSError(
                f"the certificate {tls.certificate} has a key of {kind}, which clients of gRPC"
                " refuse; RSA, P-256 and P-384 work"
            )
    found = _ENDS.search(der)
    if found is None:
        raise OSError(f"the certificate {tls.certificate} does not say when it expires")
    text = (found[1] or found[2]).decode()
    ends = datetime.strptime(text, f"%{'y' if found[1] else 'Y'}%m%d%H%M%S%z")
    made = grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)
    return made, ends.timestamp()


def _contents(tls: ServerTls) -> tuple[bytes, bytes, bytes | None]:
    client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    return tls.key.read_bytes(), tls.certificate.read_bytes(), client_ca
