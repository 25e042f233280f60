"""Runs both planes, by default with the layout of the included model, until Ctrl-C.

    make serve
    .venv/bin/python -m scripts.serve [--model FOLDER]

Set everything else by the planes' environment variables, such as KVPLANE_CONTROL_PLANE_BIND; see
``python -m control_plane --help`` and ``python -m data_plane --help``.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from kvplane.transport.health import check

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# Defaults, because a measured pool would take half of the machine's memory.
SMALL_POOL = {"num_device_blocks": 4096, "num_host_blocks": 1024}


async def serve(model: Path) -> int:
    """Start both planes, print their addresses, and stop both on a signal or when one ends. Returns
    an exit code.
    """
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)

    control = os.environ.get("KVPLANE_CONTROL_PLANE_BIND", "127.0.0.1:50051")
    data = os.environ.get("KVPLANE_DATA_PLANE_BIND", "127.0.0.1:50052")
    # The planes would find out too, but those that have the addresses would seem to be these.
    for name, address in (("CONTROL_PLANE", control), ("DATA_PLANE", data)):
        if is_taken(address):
            print(
                f"serve: error: {address} is taken: stop what listens there, such as another make "
                f"serve, or set KVPLANE_{name}_BIND",
                file=sys.stderr,
            )
            return 1
    planes: list[Process] = []
    try:
        page = os.environ.setdefault("KVPLANE_CONTROL_PLANE_PAGE_PORT", "9103")
        planes.append(await start("control_plane"))
        if not await first(told, planes, check(control, timeout_s=START_TIMEOUT_S)):
            return exit_code(told)
        arguments = ["--control-plane", control, "--model", str(model)]
        for name, num_blocks in SMALL_POOL.items():
            if f"KVPLANE_DATA_PLANE_{name.upper()}" not in os.environ:
                arguments += [f"--{name.replace('_', '-')}", str(num_blocks)]
        planes.append(await start("data_plane", *arguments))
        if not await first(told, planes, check(data, timeout_s=START_TIMEOUT_S)):
            return exit_code(told)
        print(f"control plane  {control}\ndata plane     {data}", flush=True)
        print(f"page           http://127.0.0.1:{page}\nCtrl-C stops both.", flush=True)
        await first(told, planes, asyncio.Event().wait())
        return exit_code(told)
    finally:
        for plane in reversed(planes):
            await stop(plane)


def is_taken(address: str) -> bool:
    """Whether another process listens at ``address``, "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family_of(host)):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    except ValueError:  # of which the planes say what is wrong
        return False


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def start(program: str, *arguments: str) -> Process:
    """Run ``program`` in a session of its own, so that Ctrl-C reaches only this process."""
    return await create_subprocess_exec(
        sys.executable, "-m", program, *arguments, cwd=ROOT, start_new_session=True
    )


async def first(
    told: asyncio.Event, planes: list[Process], awaited: Coroutine[Any, Any, Any]
) -> bool:
    """Whether ``awaited`` finished before a signal came or a plane ended."""
    wanted = asyncio.create_task(awaited)
    others: list[asyncio.Task[Any]] = [asyncio.create_task(told.wait())]
    others += [asyncio.create_task(plane.wait()) for plane in planes]
    await asyncio.wait([wanted, *others], return_when=asyncio.FIRST_COMPLETED)
    came = wanted.done() and not any(other.done() for other in others)
    for task in (wanted, *others):
        task.cancel()
    if came:
        await wanted
    return came


def exit_code(told: asyncio.Event) -> int:
    """0 after a signal, 1 when a plane ended by itself."""
    return 0 if told.is_set() else 1


async def stop(process: Process) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run both planes until Ctrl-C.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "recall")
    sys.exit(asyncio.run(serve(parser.parse_args().model.resolve())))
