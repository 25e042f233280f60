"""docs/security.md is run as it is written: its certificates, its access list, its commands."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
from plan_author import LAYOUT

from kvplane import ControlClient, DataClient, TlsOptions, ops
from kvplane.errors import KvplaneError, NotPermittedError

DOC = Path(__file__).resolve().parents[2] / "docs" / "security.md"
ROOT = DOC.parents[1]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)


def start(stack: ExitStack, folder: Path, command: str) -> str:
    """Run a plane of the page on a free port; its address."""
    words = shlex.split(command)
    assert words[:2] == ["python", "-m"]
    bind = words.index("--bind") + 1
    words[bind] = "127.0.0.1:0"
    port_file = folder / f"{words[2]}.port"
    process = subprocess.Popen(
        [sys.executable, *words[1:], "--metrics-port", "-1", "--port-file", str(port_file)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    deadline_s = time.monotonic() + 60
    while not port_file.exists():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    return f"127.0.0.1:{port_file.read_text().strip()}"


def test_the_page_works_as_written(tmp_path: Path) -> None:
    certificates, planes, tokens = blocks("sh")
    subprocess.run(["sh", "-euc", certificates], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "layout.json").write_text(json.dumps(asdict(LAYOUT)))
    control_command, data_command = planes.replace("\\\n", " ").splitlines()
    with ExitStack() as stack:
        control = start(stack, tmp_path, control_command)
        data_command = data_command.replace("127.0.0.1:50051", control)
        data = start(stack, tmp_path, f"{data_command} --num-device-blocks 8")
        asyncio.run(use(tmp_path, control, data))
        [python] = blocks("python")
        script = tmp_path / "client.py"
        script.write_text(
            "import asyncio\n\n\nasync def main():\n"
            + textwrap.indent(python.replace("127.0.0.1:50051", control), "    ")
            + "\n\nasyncio.run(main())\n"
        )
        ast.parse(script.read_text())
        said = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert said.stdout == "['default']\n"
    digest = subprocess.run(
        ["sh", "-euc", tokens], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.split()[0]
    assert re.fullmatch("[0-9a-f]{64}", digest)


async def use(folder: Path, control: str, data: str) -> None:
    """An engine computes on both planes; a data plane's certificate opens no session."""

    def tls(name: str) -> TlsOptions:
        return TlsOptions(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")

    async with ControlClient(control, tls=tls("engine-1")) as client:
        await client.wait_ready("default", 60)
        async with (
            await client.open_session("default", LAYOUT) as session,
            DataClient(data, tls=tls("engine-1")) as plane,
            await plane.open(session.grant) as execution,
        ):
            result = await session.step([ops.admit(1, range(4))])
            started = await execution.start(result.plan)
            assert started.num_tokens == 4
    async with ControlClient(control, tls=tls("data-plane")) as client:
        with pytest.raises(NotPermittedError):
            await client.open_session("default", LAYOUT)
    async with ControlClient(control, timeout_s=1) as client:
        with pytest.raises(KvplaneError):
            await client.list_pools()
