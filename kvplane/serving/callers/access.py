"""The access list: a file of callers with their roles, tenants and pools.

    [[callers]]
    certificate = "engine-7"        # the common name of the client's certificate
    tenant = "search"               # the certificate's name where it is not given
    roles = ["engine"]

    [[callers]]
    token_sha256 = "2c26b46b..."    # SHA-256 of the bearer token, in hex
    tenant = "search"
    roles = ["router"]

    [[callers]]
    certificate = "gpu-3"
    roles = ["plane"]
    pools = ["llama"]               # the pools that it may register for; "*" is any

The file is read again when it changes. One that is wrong then changes nothing, and is logged.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvplane.errors import InvalidRequestError, UnauthenticatedError
from kvplane.wire.v1 import types_pb2 as pb

_LOGGER: Final = logging.getLogger(__name__)

DEFAULT_TENANT: Final = "default"
ROLES: Final = {
    name.removeprefix("ROLE_").lower(): number for name, number in pb.Role.items() if number
}
ANY_POOL: Final = "*"
_RELOAD_INTERVAL_S: Final = 1.0
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = {"certificate", "token_sha256", "tenant", "roles", "pools"}
_MAX_FILE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. ``roles``: numbers of the contract's Role. ``pool_ids``: those that
    it may register data planes for.
    """

    tenant: str
    roles: frozenset[int]
    pool_ids: frozenset[str] = frozenset()

    def may_register(self, pool_id: str) -> bool:
        """Return whether the caller may register a data plane for this pool."""
        return pool_id in self.pool_ids or ANY_POOL in self.pool_ids


def everything(tenant: str) -> Caller:
    """Return a caller of ``tenant`` with every role, for a server without an access list."""
    return Caller(tenant, frozenset(ROLES.values()), frozenset([ANY_POOL]))


class AccessList:
    """Looks callers up in the access list's file. Without a file everybody has every role."""

    def __init__(self, path: Path | None) -> None:
        """Read the file. Raises InvalidRequestError naming what is wrong in it."""
        self._path = path
        self._stamp = _stamp(path)
        # By "certificate NAME" or "token SHA256".
        self._callers: Mapping[str, Caller] = {} if path is None else _read(path)
        self._tenants = self._listed_tenants()
        self._num_reloads = 0
        self._next_look_s = time.monotonic() + _RELOAD_INTERVAL_S

    @property
    def is_open(self) -> bool:
        """Whether there is no file, so that everybody has every role."""
        return self._path is None

    @property
    def num_reloads(self) -> int:
        """How often the file was read again."""
        self._reload()
        return self._num_reloads

    def caller(self, name: str | None, token: str | None) -> Caller:
        """Find the caller by certificate or, if the list has no such certificate, by bearer token.
        ``name``: the certificate's common name; None for a client without one.

        Raises UnauthenticatedError if the list has neither.
        """
        if self._path is None:
            return everything(DEFAULT_TENANT if name is None else name)
        self._reload()
        callers = self._callers
        caller = None if name is None else callers.get(f"certificate {name}")
        if caller is None and token is not None:
            caller = callers.get(f"token {hashlib.sha256(token.encode()).hexdigest()}")
        if caller is None:
            raise UnauthenticatedError(
                "the access list has neither the caller's certificate nor its bearer token"
            )
        return caller

    def metrics_label(self, tenant: str) -> str:
        """Return the tenant if the list has it, else "other": a metric has a bounded number of
        labels. Without a list, only "default" has a label of its own.
        """
        return tenant if tenant in self._tenants else "other"

    def _listed_tenants(self) -> frozenset[str]:
        listed = frozenset(caller.tenant for caller in self._callers.values())
        return listed or frozenset([DEFAULT_TENANT])

    def _reload(self) -> None:
        now_s = time.monotonic()
        if self._path is None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _RELOAD_INTERVAL_S
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = _read(self._path)
        except InvalidRequestError as error:
            _LOGGER.error("access list not read again: %s", error)
        else:
            self._tenants = self._listed_tenants()
            self._num_reloads += 1
            _LOGGER.info("access list read again num_callers=%d", len(self._callers))


def _read(path: Path) -> dict[str, Caller]:
    """Parse the access list's file to callers. Raises InvalidRequestError naming what is wrong."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise InvalidRequestError(
                f"{path} has more than {_MAX_FILE_BYTES} bytes", field="access_file"
            )
        content = tomllib.loads(text.decode())
    except OSError as error:
        raise InvalidRequestError(f"cannot be read: {error}", field="access_file") from error
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not TOML: {error}", field="access_file") from error
    entries = content.pop("callers", [])
    if content or not isinstance(entries, list):
        raise InvalidRequestError(
            f"{path} must hold [[callers]] and nothing else", field="access_file"
        )
    callers: dict[str, Caller] = {}
    for i, entry in enumerate(entries):
        field = f"access_file.callers[{i}]"
        key, caller = _read_caller(entry, field)
        if key in callers:
            raise InvalidRequestError("is there twice", field=field)
        callers[key] = caller
    return callers


def _read_caller(entry: Any, field: str) -> tuple[str, Caller]:
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS:
        raise InvalidRequestError(f"may have {', '.join(sorted(_FIELDS))}", field=field)
    certificate, digest = (_text(entry, name, field) for name in ("certificate", "token_sha256"))
    if (not certificate) == (not digest):
        raise InvalidRequestError("needs either certificate or token_sha256", field=field)
    if digest and not _SHA256.fullmatch(digest):
        raise InvalidRequestError("must be 64 hex digits", field=f"{field}.token_sha256")
    tenant = _text(entry, "tenant", field) or certificate
    if not tenant:
        raise InvalidRequestError("is needed with a token", field=f"{field}.tenant")
    roles = _texts(entry, "roles", field)
    if not roles or not set(roles) <= ROLES.keys():
        raise InvalidRequestError(f"must be some of {', '.join(ROLES)}", field=f"{field}.roles")
    pools = _texts(entry, "pools", field)
    if bool(pools) != ("plane" in roles):
        raise InvalidRequestError("is needed with the role plane, only", field=f"{field}.pools")
    key = f"certificate {certificate}" if certificate else f"token {digest}"
    return key, Caller(tenant, frozenset(ROLES[role] for role in roles), frozenset(pools))


def _text(entry: Mapping[str, Any], name: str, field: str) -> str:
    text = entry.get(name, "")
    if not isinstance(text, str):
        raise InvalidRequestError("must be a string", field=f"{field}.{name}")
    return text


def _texts(entry: Mapping[str, Any], name: str, field: str) -> Sequence[str]:
    texts = entry.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("must be a list of strings", field=f"{field}.{name}")
    return texts


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return a value that changes whenever the file does; None if there is no such file."""
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else None
