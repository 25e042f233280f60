"""Registration by itself, and data planes that send it a test's choice of messages."""

from __future__ import annotations

import itertools
from typing import Any

from control_plane.config import CoreConfig
from control_plane.pools.pool import Pool
from control_plane.pools.publications import root_of
from control_plane.registration.registration import Registration
from control_plane.sessions.sessions import Sessions
from kvplane.errors import SessionNotFoundError
from kvplane.wire import signing
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.pool_writer import NativeSession
from tests.helpers.planning.registration_messages import LAYOUT, all_outgoing, hello, report

INCARNATION = 7
ROOT = root_of(LAYOUT.fingerprint, "default", "")


def key_of(number: int) -> bytes:
    """Return a pool's key: those of incarnation ``i`` are numbered from ``1000 * i`` on."""
    return number.to_bytes(32)


class World:
    """Registration of pools whose sessions hold nothing."""

    def __init__(self, incarnation: int = INCARNATION, **settings: Any) -> None:
        self.incarnation = incarnation
        self.pools: dict[str, Pool] = {}
        session_ids = itertools.count(1)
        config = CoreConfig(watermark=0.0, **settings)
        self.sessions = Sessions(
            config,
            incarnation=incarnation,
            clock=lambda: 0.0,
            new_session_id=lambda: next(session_ids),
        )
        keys = map(key_of, itertools.count(1000 * incarnation))
        self.it = Registration(self.pools, self.sessions, config=config, new_key=lambda: next(keys))

    @property
    def pool(self) -> Pool:
        return self.pools["pool"]

    def open_sessions(self) -> set[int]:
        return {session.id for session in self.sessions.of(self.pool)}

    def open_session(self) -> int:
        return self.open_writer().id

    def open_writer(self) -> NativeSession:
        """Open a session that can write prompts."""
        return NativeSession(self.sessions.open(self.pool, cpb.OpenSessionRequest(), "default"))

    def end_session(self, session_id: int) -> None:
        self.sessions.end(self.sessions.by_id[session_id], SessionNotFoundError)

    def ref(self, session_id: int) -> tpb.SessionRef:
        return tpb.SessionRef(incarnation=self.incarnation, session_id=session_id)


class Plane:
    """A data plane's process, of which only registration is simulated."""

    def __init__(self, world: Any, **fields: Any) -> None:
        """``world.it``: what it registers with. ``fields``: of its Hello."""
        self.world = world
        self.hello = hello(**fields)
        self.welcome = rpb.Welcome()

    @property
    def key(self) -> tuple[str, int, int]:
        return self.hello.pool_id, self.hello.shard.index, self.hello.epoch

    def register(self, **changes: Any) -> rpb.Welcome:
        said, self.hello = self.hello, rpb.Hello()
        self.hello.CopyFrom(said)
        self.hello.MergeFrom(rpb.Hello(**changes))
        self.welcome = self.world.it.register(self.hello)
        if not self.welcome.resumed:
            self.hello.incarnation = self.welcome.incarnation
            self.hello.key_id = signing.key_id(self.welcome.key)
        return self.welcome

    def report(self, part: rpb.BlockReport | None = None) -> None:
        self.world.it.report(*self.key, part or report())

    def join(self, part: rpb.BlockReport | None = None) -> rpb.Welcome:
        self.register()
        self.report(part)
        return self.welcome

    def leave(self) -> None:
        self.world.it.disconnect(*self.key)

    def fence_done(self, session_id: int, incarnation: int = INCARNATION) -> None:
        session = tpb.SessionRef(incarnation=incarnation, session_id=session_id)
        self.world.it.fence_done(*self.key, rpb.FenceDone(session=session))

    def take(self) -> list[rpb.RegisterResponse]:
        return all_outgoing(self.world.it, *self.key[:2])

    def kinds(self) -> list[str | None]:
        """Return the kinds of its messages."""
        return [message.WhichOneof("message") for message in self.take()]
