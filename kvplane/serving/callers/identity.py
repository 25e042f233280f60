"""A caller's identity and rights. The server takes both from the connection and from its access
list, never from a request, since they decide which prefixes the caller shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor

from kvplane.errors import NotPermittedError, PlaneUnavailableError, UnauthenticatedError
from kvplane.serving.callers.access import ROLES, AccessList, Caller
from kvplane.v1 import types_pb2 as contract

_CALLER: ContextVar[Caller] = ContextVar("kvplane_caller")
_PAYER: ContextVar[str] = ContextVar("kvplane_payer")
_ROLE_NAMES: Final = {number: name for name, number in ROLES.items()}
_BEARER: Final = "bearer "
_ESCAPED: Final = re.compile(rb"\\.")  # of a subject as RFC 2253 writes it
_COMMON_NAME: Final = re.compile(rb"(?:^|[,+])CN=")
HEALTH_CHECKS: Final = "/grpc.health.v1.Health/"
"""The names of the methods that need no known caller begin with this."""


def caller() -> Caller:
    """Return the caller of the current call."""
    return _CALLER.get()


def payer() -> str:
    """Return the account that the current call's bytes and time count for: a tenant, or a
    connection whose tenant is not known.
    """
    return _PAYER.get()


class Gate:
    """Admits calls whose callers have one of the roles that the contract requires.

    Health checks are open to all. Other methods that the contract does not have, such as
    reflection, are open to every known caller.
    """

    stands_by = False
    """Says whether another server leads. If so, all calls of the contract are refused."""

    def __init__(self, access: AccessList, services: Iterable[ServiceDescriptor]) -> None:
        self._access = access
        audience: Any = contract.audience
        callers: Any = contract.callers
        self._roles: dict[str, frozenset[int]] = {
            f"/{service.full_name}/{method.name}": frozenset(
                method.GetOptions().Extensions[callers].roles
                or service.GetOptions().Extensions[audience].roles
            )
            for service in services
            for method in service.methods
        }

    @property
    def is_open(self) -> bool:
        """Return whether callers need not identify themselves."""
        return self._access.is_open

    @property
    def num_reloads(self) -> int:
        """How often the access list was read again."""
        return self._access.num_reloads

    def admit(self, method: str, context: Any) -> str:
        """Admit a call, and set ``caller`` and ``payer`` for this task. Returns the payer.
        ``method``: "/SERVICE/METHOD".

        Raises UnauthenticatedError and NotPermittedError, and PlaneUnavailableError when the server
        stands by.
        """
        counts_as: str = context.peer()
        roles = self._roles.get(method)
        if method.startswith(HEALTH_CHECKS):
            return counts_as
        if self.stands_by:
            raise PlaneUnavailableError(
                "this server stands by: call the one that leads, which is the one that is SERVING"
            )
        name = _certificate_name(context)
        who = self._access.caller(name, _bearer_token(context))
        if roles and not roles & who.roles:
            raise NotPermittedError(
                f"{method.rpartition('/')[2]} needs the role "
                f"{' or '.join(_ROLE_NAMES[role] for role in sorted(roles))}"
            )
        _CALLER.set(who)
        if name is not None or not self._access.is_open:
            counts_as = f"tenant {who.tenant}"
        _PAYER.set(counts_as)
        return counts_as


def _certificate_name(context: Any) -> str | None:
    """Return the common name of the client's certificate; None for a client without one. gRPC has
    the first of several names, and the authority may have looked at another.
    """
    attributes = context.auth_context()
    names = list(attributes.get("x509_common_name", ()))
    if not names:
        return None
    subject = b"".join(attributes.get("x509_subject", ()))
    if len(_COMMON_NAME.findall(_ESCAPED.sub(b"", subject))) > 1:
        raise UnauthenticatedError("the client certificate has several common names")
    try:
        name: str = names[0].decode()
    except UnicodeDecodeError:
        name = ""
    if not name:
        raise UnauthenticatedError("the client certificate's common name is empty")
    return name


def _bearer_token(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value[:7].lower() == _BEARER:
            return value[7:]
    return None
