"""The probe that container healthchecks run, against real servers."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from kvplane.serving import server as serving
from kvplane.transport.health import check

SERVICE = "kvplane.v1.SessionService"


@pytest.fixture
async def server():
    server = serving.build("127.0.0.1:0", max_message_bytes=1 << 20)
    await server.start([SERVICE])
    yield server
    await server.stop(0)


async def probe(*args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvplane.transport.health", *args, stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().strip(), err.decode().strip()


async def test_a_serving_server_is_exit_code_0(server) -> None:
    assert await probe(server.address) == (0, "SERVING", "")


async def test_a_server_that_is_not_ready_is_exit_code_1(server) -> None:
    await server.set_serving(SERVICE, False)
    assert await check(server.address) == "SERVING"
    assert await probe(server.address, "--service", SERVICE) == (1, "NOT_SERVING", "")


async def test_a_service_that_is_not_there_is_exit_code_1_with_one_line(server) -> None:
    code, out, err = await probe(server.address, "--service", "no.such.Service")
    assert (code, out) == (1, "")
    assert err.startswith(server.address)
    assert "\n" not in err


async def test_no_server_at_all_is_exit_code_1_with_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and never listening: nobody answers
        address = f"127.0.0.1:{free.getsockname()[1]}"
        code, out, err = await probe(address, "--timeout-s", "0.5")
    assert (code, out) == (1, "")
    assert err.startswith(address)
    assert "\n" not in err


async def test_bad_arguments_are_exit_code_2() -> None:
    assert (await probe("127.0.0.1:1", "--timeout-s", "-1"))[0] == 2
    assert (await probe("127.0.0.1:1", "--tls-cert", "no-such.pem"))[0] == 2
