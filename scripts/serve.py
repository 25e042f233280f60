"""Runs both planes, by default with the layout of the included model, until Ctrl-C.

    make serve
    .venv/bin/python -m scripts.serve [--model FOLDER]

Set everything else by the planes' environment variables, such as KVPLANE_CONTROL_PLANE_BIND; see
``python -m control_plane --help`` and ``python -m data_plane --help``.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.planes import ROOT, START_TIMEOUT_S, stop

# Defaults, because a measured pool would take half of the machine's memory.
SMALL_POOL = {"num_device_blocks": 4096, "num_host_blocks": 1024}


def serve(model: Path, port_files: Path) -> int:
    """Start both planes, print their addresses, and stop both on a signal or when one ends. Return
    an exit code: 0 after a signal, 1 when a plane ended by itself.
    """
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))

    control = os.environ.get("KVPLANE_CONTROL_PLANE_BIND", "127.0.0.1:50051")
    data = os.environ.get("KVPLANE_DATA_PLANE_BIND", "127.0.0.1:50052")
    # The planes would fail too, but whatever holds the addresses would pass for them.
    for name, address in (("CONTROL_PLANE", control), ("DATA_PLANE", data)):
        if is_taken(address):
            print(
                f"serve: error: {address} is taken: stop what listens there, such as another make "
                f"serve, or set KVPLANE_{name}_BIND",
                file=sys.stderr,
            )
            return 1
    page = os.environ.setdefault("KVPLANE_CONTROL_PLANE_PAGE_PORT", "9103")
    flags = ["--control-plane", control, "--model", str(model)]
    for name, num_blocks in SMALL_POOL.items():
        if f"KVPLANE_DATA_PLANE_{name.upper()}" not in os.environ:
            flags += [f"--{name.replace('_', '-')}", str(num_blocks)]

    planes: list[subprocess.Popen[bytes]] = []

    def goes_on() -> bool:
        return not signals and all(plane.poll() is None for plane in planes)

    try:
        for program, arguments in (("control_plane", []), ("data_plane", flags)):
            port_file = port_files / program
            command = [sys.executable, "-m", program, "--port-file", str(port_file), *arguments]
            # In a session of its own, so that Ctrl-C reaches only this process.
            planes.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True))
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while goes_on() and not port_file.exists():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{program} did not start in {START_TIMEOUT_S:.0f} s")
                time.sleep(0.1)
            if not goes_on():
                return 0 if signals else 1
        print(f"control plane  {control}\ndata plane     {data}", flush=True)
        print(f"page           http://127.0.0.1:{page}\nCtrl-C stops both.", flush=True)
        while goes_on():
            time.sleep(0.1)
        return 0 if signals else 1
    finally:
        for plane in reversed(planes):
            stop(plane)


def is_taken(address: str) -> bool:
    """Return whether another process listens at ``address``, "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family_of(host)):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    except ValueError:  # the planes report what is wrong with it
        return False


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run both planes until Ctrl-C.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "recall")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(serve(parser.parse_args().model.resolve(), Path(folder)))
