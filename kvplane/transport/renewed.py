"""Certificates and keys, reloaded when their files change.

Files that are wrong, such as a certificate without its key while both are being replaced, change
nothing and are logged.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvplane.errors import InvalidRequestError

_LOGGER: Final = logging.getLogger(__name__)

T = TypeVar("T")


class Renewed(Generic[T]):
    """A value made from files, and made again when they change. Thread-safe."""

    def __init__(self, make: Callable[[], T], files: Sequence[Path | None]) -> None:
        """``make`` makes the value, also here. Raises its OSError or InvalidRequestError."""
        self._make = make
        self._files = [file for file in files if file is not None]
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._value = make()

    def get(self) -> T:
        """Return the value for the files as they are, or as they were when they were last valid."""
        with self._lock:
            stamps = self._look()
            if stamps == self._stamps:
                return self._value
            self._stamps = stamps
            names = " ".join(map(str, self._files))
            try:
                self._value = self._make()
            except (OSError, InvalidRequestError) as error:
                _LOGGER.error("not renewed files=%s error=%s", names, error)
            else:
                _LOGGER.info("renewed files=%s", names)
            return self._value

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return a value that changes whenever one of the files does."""
        stamps: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = file.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return stamps


def server_context(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Make a server's TLS context with a certificate and its key. ``client_ca``: signs the
    certificates that clients must present. All are PEM files. Raises OSError for those that are
    wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")  # it never asks the terminal
    if client_ca is not None:
        load_authorities(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_authorities(context: ssl.SSLContext, file: Path) -> None:
    """Trust the authorities in a PEM file. Raises OSError naming the file when it has none."""
    try:
        context.load_verify_locations(file)
    except OSError as error:
        raise OSError(f"{file} has no certificate of an authority: {error}") from error
    if not context.cert_store_stats()["x509"]:
        raise OSError(f"{file} has no certificate of an authority")


def renewed_context(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Make a ``server_context`` whose new connections use the files as they then are."""
    files = certificate, key, client_ca
    renewed = Renewed(lambda: server_context(*files), files)

    def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: object) -> None:
        connection.context = renewed.get()

    context = server_context(*files)
    context.sni_callback = renew
    return context
