"""The context with which the router connects to engines."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from kvplane.transport.renewed import Renewed


class RenewedClientContext(ssl.SSLContext):
    """A client's context whose connections trust the authorities that the file has when they begin.
    For clients that do their own input and output, as asyncio's do.
    """

    _renewed: Renewed[ssl.SSLContext]

    def __new__(cls, ca: Path) -> RenewedClientContext:
        """``ca``: a PEM file. Raises OSError when it is wrong."""
        self = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        self._renewed = Renewed(lambda: ssl.create_default_context(cafile=ca), [ca])
        return self

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._renewed.get().wrap_bio(*args, **kwargs)
