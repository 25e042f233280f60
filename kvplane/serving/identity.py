"""Who a caller is. The server takes it from the connection, never from a request, since it
decides which prefixes the caller shares.
"""

from __future__ import annotations

from typing import Final

import grpc.aio

from kvplane.errors import UnauthenticatedError

DEFAULT_TENANT: Final = "default"


def tenant_of(context: grpc.aio.ServicerContext) -> str:  # type: ignore[type-arg]
    """The common name of a peer that presented a client certificate, else ``DEFAULT_TENANT``.

    Raises UnauthenticatedError when a certificate names nobody.
    """
    names = list(context.auth_context().get("x509_common_name", ()))
    if not names:
        return DEFAULT_TENANT
    try:
        name = names[0].decode()
    except UnicodeDecodeError:
        name = ""
    if not name:
        raise UnauthenticatedError("the client certificate's common name is empty")
    return name
