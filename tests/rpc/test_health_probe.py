"""The probe that container healthchecks run, against real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from kvplane.serving import server as serving
from kvplane.transport.health import check, main

SERVICE = "kvplane.v1.SessionService"


@pytest.fixture
async def server():
    server = serving.build("127.0.0.1:0", max_message_bytes=1 << 20)
    await server.start([SERVICE])
    yield server
    await server.stop(0)


async def test_the_exit_code_says_whether_a_server_serves(server, capsys) -> None:
    async def probe(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, words)
        said = capsys.readouterr()
        return code, said.out.strip(), said.err.strip()

    assert await probe(server.address) == (0, "SERVING", "")
    await server.set_serving(SERVICE, False)
    assert await check(server.address) == "SERVING"
    assert await probe(server.address, "--service", SERVICE) == (1, "NOT_SERVING", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and never listening: nobody answers
        absent = f"127.0.0.1:{free.getsockname()[1]}"
        for address, *words in (
            (server.address, "--service", "no.such.Service"),
            (absent, "--timeout-s", "0.5"),
        ):
            code, out, err = await probe(address, *words)
            assert (code, out, "\n" in err) == (1, "", False)
            assert err.startswith(address)
    assert (await probe("127.0.0.1:1", "--timeout-s", "-1"))[0] == 2
    assert (await probe("127.0.0.1:1", "--tls-cert", "no-such.pem"))[0] == 2


def test_it_is_a_program() -> None:
    command = [sys.executable, "-m", "kvplane.transport.health", "127.0.0.1:1", "--timeout-s=-1"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 2
