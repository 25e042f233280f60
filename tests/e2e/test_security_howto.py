"""docs/security.md is run as it is written: its certificates, its access list, its commands."""

from __future__ import annotations

import asyncio
import re
import shlex
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_planes import save_byte_model

from kvplane import ControlClient, DataClient, Tls, layout_from_hf
from kvplane.errors import KvplaneError, NotPermittedError
from tests.helpers import programs
from tests.helpers.planes_in_process import control_plane
from tests.helpers.waiting import wait_until

DOC = programs.ROOT / "docs" / "security.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)


def start(stack: ExitStack, folder: Path, command: str) -> str:
    """Run a plane of the page on a free port; its address."""
    words = shlex.split(command)
    bind = words.index("--bind") + 1
    words[bind] = "127.0.0.1:0"
    port_file = folder / f"{words[1]}.port"
    flags = (*words[1:], "--metrics-port", "-1", "--port-file", str(port_file))
    process = programs.Program(words[0], *flags, cwd=folder, out=folder / f"{words[1]}.log")
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    wait_until(port_file.exists)
    return f"127.0.0.1:{port_file.read_text().strip()}"


def run(folder: Path, command: str) -> str:
    """Return the text that a command of the page prints."""
    words = shlex.split(command)
    done = programs.run(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly  # makes certificates and starts four programs
def test_the_page_works_as_written(tmp_path: Path) -> None:
    certificates, planes, engine, tokens = blocks("sh")
    programs.printed("sh", "-euc", certificates, cwd=tmp_path)
    asyncio.run(an_engine_passes_as_no_plane(tmp_path))
    save_byte_model(tmp_path / "MODEL")
    control_command, data_command = planes.replace("\\\n", " ").splitlines()
    with ExitStack() as stack:
        control = start(stack, tmp_path, control_command)
        data_command = data_command.replace("127.0.0.1:50051", control)
        data = start(stack, tmp_path, f"{data_command} --num-device-blocks 8")
        asyncio.run(others(tmp_path, control, data))
        asked = run(tmp_path, engine.replace("127.0.0.1:50051", control).replace("\\\n", " "))
        assert asked.strip()
        [python] = blocks("python")
        program = (
            "import asyncio\n\n\nasync def main():\n"
            + textwrap.indent(python.replace("127.0.0.1:50051", control), "    ")
            + "\n\nasyncio.run(main())\n"
        )
        done = programs.run("-c", program, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "['default']\n"), done.stderr
    digest = programs.printed("sh", "-euc", tokens, cwd=tmp_path).split()[0]
    assert re.fullmatch("[0-9a-f]{64}", digest)


async def an_engine_passes_as_no_plane(folder: Path) -> None:
    stolen = {"tls_cert": folder / "engine-1.pem", "tls_key": folder / "engine-1.key"}
    async with control_plane(**stolen) as plane:
        for name in ("", "engine-1"):
            tls = Tls(ca_file=folder / "ca.pem", server_name=name)
            async with ControlClient(plane.address, tls=tls, timeout_s=2) as client:
                with pytest.raises(KvplaneError):
                    await client.get_server_info()


async def others(folder: Path, control: str, data: str) -> None:
    """A data plane's certificate opens no session, and nobody is served without one."""

    def tls(name: str) -> Tls:
        return Tls(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")

    layout = layout_from_hf(folder / "MODEL")
    async with ControlClient(control, tls=tls("engine-1")) as client:
        await client.wait_ready("default", 60)
        session = await client.open_session("default", layout)
        async with DataClient(data, tls=tls("data-plane")) as plane:
            with pytest.raises(NotPermittedError):
                await plane.open(session.grant)
        await session.close()
    async with ControlClient(control, tls=tls("data-plane")) as client:
        with pytest.raises(NotPermittedError):
            await client.open_session("default", layout)
    async with ControlClient(control, timeout_s=1) as client:
        with pytest.raises(KvplaneError):
            await client.list_pools()
