"""A Ray actor of a fleet: runs a server as a child process, and reports its address."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import ray

from .placement import Server, command
from .server_process import ServerProcess

NAMESPACE: Final = "kvplane"
_ANSWER_S: Final = 5.0
_KNOWN_S: Final = 60.0
_POLL_S: Final = 0.1
_SHORT_RUN_S: Final = 10.0
_RESTART_DELAY_S: Final = 2.0  # after a short run: Ray itself waits for nothing


class Status(NamedTuple):
    """Status of a server. ``address``: "host:port", empty while it is not up."""

    name: str
    node: str
    address: str
    pid: int
    actor_pid: int


class ServerActor:
    """Runs one server, and ends when that has ended, so that Ray starts both again where they fit.
    ``control``: names of the control planes' actors, for a data plane.
    """

    def __init__(self, server: Server, control: list[str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._server = server
        self._control = control
        self._host = ray.util.get_node_ip_address()
        self._follows: set[str] = set()
        self._began_s = time.monotonic()
        self._process = ServerProcess(self._command, self._end, self._follows_nobody)

    def status(self) -> Status:
        """Return the present status."""
        port = self._process.port
        address = f"{self._host}:{port}" if port else ""
        return Status(self._server.name, self._host, address, self._process.pid, os.getpid())

    def stop(self) -> None:
        """End the server in order."""
        self._process.stop()

    def _end(self) -> None:
        if time.monotonic() - self._began_s < _SHORT_RUN_S:
            time.sleep(_RESTART_DELAY_S)
        os._exit(1)

    def _command(self, port_file: Path) -> list[str]:
        control = addresses_of(self._control, _KNOWN_S) if self._control else []
        self._follows = set(control)
        return command(self._server, sys.executable, self._host, str(port_file), control)

    def _follows_nobody(self) -> bool:
        """Return whether all control planes have moved since this data plane started. Its blocks
        are of no use then: no control plane can plan for it.
        """
        if not self._control:
            return False
        there = {each.address for each in statuses(self._control) if each.address}
        return bool(there) and not there & self._follows


def addresses_of(names: list[str], timeout_s: float) -> list[str]:
    """Return the addresses of these actors' servers. Those that are not up are left out, after a
    wait; raises TimeoutError when none is up.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        found = [each.address for each in statuses(names) if each.address]
        if len(found) == len(names):
            return found
        if time.monotonic() >= end_s:
            if found:
                return found
            raise TimeoutError(f"none of {', '.join(names)} is up")
        time.sleep(_POLL_S)


def statuses(names: list[str]) -> list[Status]:
    """Return the statuses of those actors that exist and answer."""
    asked = []
    for name in names:
        try:
            asked.append(ray.get_actor(name, NAMESPACE).status.remote())
        except ValueError:  # there is none
            continue
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    found = []
    for answer in done:
        try:
            found.append(ray.get(answer))
        except ray.exceptions.RayError:  # it is being started again
            continue
    return found
