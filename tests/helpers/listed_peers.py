"""Both planes over TLS with an access list, and callers of several tenants and roles.

Callers authenticate by bearer tokens, one for each, so one server certificate serves them all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from control_plane.server.server import ControlPlaneServer
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, Tls
from tests.helpers.checked_engine import Engine
from tests.helpers.data.data_server import config_of
from tests.helpers.data.plan_author import LAYOUT, POOL_ID
from tests.helpers.planes_in_process import control_plane

TLS = Path(__file__).parents[1] / "rpc" / "tls"
ROLES = {
    "engine-a": ("a", "engine"),
    "engine-b": ("b", "engine"),
    "router": ("a", "router"),
    "operator": ("a", "operator"),
    "plane": ("plane", "plane"),
}


def listed(*names: str) -> str:
    callers = []
    for name in names:
        tenant, role = ROLES[name]
        pools = f'pools = ["{POOL_ID}"]' if role == "plane" else ""
        digest = hashlib.sha256(name.encode()).hexdigest()
        callers.append(
            f'[[callers]]\ntoken_sha256 = "{digest}"\ntenant = "{tenant}"\n'
            f'roles = ["{role}"]\n{pools}\n'
        )
    return "\n".join(callers)


class Peers:
    """Both planes, and the callers' credentials."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.access_file = folder / "access.toml"
        self.access_file.write_text(listed(*ROLES))
        self.control: ControlPlaneServer
        self.data: DataPlaneServer

    def serving(self) -> dict[str, Path]:
        return {
            "tls_cert": TLS / "server.pem",
            "tls_key": TLS / "server.key",
            "access_file": self.access_file,
        }

    def registering(self) -> dict[str, Any]:
        """Return the settings of a data plane that is listed, for both of its sides."""
        plane = self.tls("plane")
        return {
            "tls": True,
            "tls_ca": plane.ca_file,
            "tls_name": plane.server_name,
            "token_file": plane.token_file,
            **self.serving(),
        }

    def tls(self, name: str) -> Tls:
        path = self.folder / f"{name}.token"
        path.write_text(f"{name}\n")
        return Tls(
            ca_file=TLS / "ca.pem", server_name="kvplane.test", token_file=path if name else None
        )

    def client(self, name: str) -> ControlClient:
        return ControlClient(self.control.address, tls=self.tls(name), timeout_s=30)

    def data_client(self, name: str) -> DataClient:
        return DataClient(self.data.address, tls=self.tls(name), timeout_s=30)

    @asynccontextmanager
    async def engine(self, name: str) -> AsyncIterator[Engine]:
        """Yield an engine of both planes that checks every output."""
        async with (
            self.client(name) as control,
            self.data_client(name) as data,
            await control.open_session(POOL_ID, LAYOUT) as session,
            await data.open(session.grant) as execution,
        ):
            yield Engine(session, execution)


@asynccontextmanager
async def listed_peers(folder: Path) -> AsyncIterator[Peers]:
    """Run both planes until the body ends; then check their integrity."""
    peers = Peers(folder)
    async with control_plane(grace_s=1.0, **peers.serving()) as peers.control:
        config = config_of(folder, peers.control.address, **peers.registering())
        peers.data = await DataPlaneServer.start(config)
        try:
            async with asyncio.timeout(60):
                await peers.data.registered.wait()
            yield peers
            peers.data.executor.check_integrity()
        finally:
            await peers.data.stop()
