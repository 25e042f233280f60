"""Which payload version the planes of one pool use with each other.

Each plane knows a range of versions, and a pool uses the newest one that all of its planes know. So
its data planes can be updated one after the other. A data plane for which there is no such version
is refused when it registers: otherwise the pool would look ready, and every plan would be refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvplane.errors import ProtocolMismatchError
from kvplane.release import release
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION, OLDEST_PAYLOAD_VERSION


@dataclass(frozen=True)
class _Plane:
    """A plane ("control plane" or "data plane"), its release and the payload versions it knows."""

    kind: str
    release: str
    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.kind} {self.release!r}"


def payload_version(hellos: Iterable[rpb.Hello]) -> int:
    """Return the newest payload version that this control plane and these data planes know.

    Raises ProtocolMismatchError, naming the releases that have none in common, and the one to
    update.
    """
    oldest, newest = OLDEST_PAYLOAD_VERSION, NEWEST_PAYLOAD_VERSION
    planes = [_Plane("control plane", release(), oldest, newest)]
    planes += (
        _Plane("data plane", x.version, x.oldest_payload_version, x.newest_payload_version)
        for x in hellos
    )
    behind = min(planes, key=lambda plane: plane.newest)
    ahead = max(planes, key=lambda plane: plane.oldest)
    if behind.newest < ahead.oldest:
        raise ProtocolMismatchError(
            f"the {behind} knows payload versions up to {behind.newest}, and the {ahead} from "
            f"{ahead.oldest} on: update the {behind}",
            field="hello.newest_payload_version",
        )
    return behind.newest
