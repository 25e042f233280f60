"""Settings of a plug-in, and the namespaces in which its chunks are found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from kvplane.transport.tls import Tls

_MAX_NAMESPACE: Final = 128  # characters, as in OpenSessionRequest
_HASHED: Final = "sha256:"


@dataclass(frozen=True)
class ChunkSettings:
    """Where the pool is, and how long an engine waits for it. ``namespace``: in front of all of the
    engine's own. ``ca`` to ``token_file``: paths, as of ``kvplane.Tls``.

    ``lookup_s``: a look-up that takes longer is a miss. ``transfer_s``: a load or store that takes
    longer has failed; a look-up reads files for as long. ``breaker_s``: how long everything is a
    miss after a failure. ``max_queued_bytes``: of stores that wait; more are dropped.
    ``connect_s``: how long the engine's start waits for the pool. ``break_even_bytes_per_s``: while
    loads are slower, computing is faster, and look-ups are misses; left out, any speed will do.
    """

    control_plane: str = "127.0.0.1:50051"
    pool_id: str = "default"
    namespace: str = ""
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    token_file: str | None = None
    lookup_s: float = 0.2
    transfer_s: float = 1.0
    breaker_s: float = 5.0
    max_queued_bytes: int = 1 << 30
    connect_s: float = 5.0
    break_even_bytes_per_s: float = 0.0

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> ChunkSettings:
        """Read the settings in an engine's JSON. Raises ValueError naming what is wrong."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"{name}: is no setting; there are {', '.join(kinds)}")
            kind = kinds[name]
            wanted = (int, float) if kind is float else str if kind is type(None) else kind
            if isinstance(value, bool) or not isinstance(value, wanted):
                raise ValueError(f"{name}: must be a {kind.__name__}, is {value!r}")
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name}: must be above 0, is {value!r}")
        return cls(**given)

    @property
    def tls(self) -> Tls | None:
        """The TLS options; None where there are none."""
        paths = [self.ca, self.certificate, self.key, self.token_file]
        if not any(paths):
            return None
        ca, certificate, key, token = (None if path is None else Path(path) for path in paths)
        return Tls(ca_file=ca, cert_file=certificate, key_file=key, token_file=token)


def namespace_of(base: str, *parts: object) -> str:
    """Return the namespace of an identity, such as a salt, an adapter and a version of the weights.
    Different parts have different namespaces; None and "" differ, too. What is longer than a
    namespace may be is hashed.
    """
    said = "".join(f"/{len(text)}:{text}" for text in map(_said, parts))
    full = f"{base}{said}"
    if len(full) <= _MAX_NAMESPACE and _HASHED not in base:
        return full
    return _HASHED + hashlib.sha256(f"{len(base)}:{full}".encode()).hexdigest()


def _said(part: object) -> str:
    return "" if part is None else f"{type(part).__name__}={part}"
