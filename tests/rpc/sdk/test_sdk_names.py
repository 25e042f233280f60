"""Names of planes that move to another address."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.planes_in_process import control_plane

# The client sees another /etc/hosts; for each line of its input it asks once.
CLIENT = """
import sys
from kvplane.sync import ControlClient
with ControlClient(sys.argv[1]) as client:
    for _ in sys.stdin:
        print(client.list_pools(timeout_s=10), flush=True)
"""
WITH_HOSTS = ["unshare", "--map-root-user", "--mount"]
WITH_HOSTS += ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']


@pytest.mark.parametrize("scheme", ["", "dns:///"])
async def test_a_name_that_moves_is_found_within_seconds(scheme: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 moves.test\n")
    async with control_plane(bind="127.0.0.2:0") as before:
        port = before.address.rpartition(":")[2]
        client = await asyncio.create_subprocess_exec(
            *(*WITH_HOSTS, str(hosts), sys.executable, "-c", CLIENT),
            f"{scheme}moves.test:{port}",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(b"\n")
        assert await client.stdout.readline() == b"[]\n"
    hosts.write_text("127.0.0.3 moves.test\n")
    async with control_plane(bind=f"127.0.0.3:{port}"):
        client.stdin.write(b"\n")
        assert await client.stdout.readline() == b"[]\n"
    client.stdin.close()
    assert await client.wait() == 0
