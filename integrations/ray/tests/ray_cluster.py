"""A Ray cluster of simulated nodes on loopback: each has an address and a raylet of its own.

Ray listens on all interfaces, so run it in a network of its own, as ``make fleet`` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Read by Ray's processes when they start. A lost node is noticed after two seconds rather than
# fifteen; the contents of the global control store outlive its process.
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_storage": "rocksdb",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
POOL = "pool-0"  # the pool whose parts tests take away
UP_S = 120.0  # for servers to come up, on a busy machine
_END_S = 60.0


class SimulatedCluster:
    """``with SimulatedCluster(2) as cluster``: a head, which has one CPU, and two more nodes of
    ``num_cpus``, at 127.0.0.2 and after.
    """

    def __init__(self, num_nodes: int, num_cpus: int = 4) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvray-")
        # Ray writes an address there too, and does not make the folder.
        Path(self._folder, "ray").mkdir()
        own = {"RAY_gcs_storage_path": f"{self._folder}/gcs", "RAY_TMPDIR": self._folder}
        os.environ.update(SETTINGS | own)
        with Path(self._folder, "nodes.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    Path(__file__).with_name("ray_nodes.py"),
                    self._folder,
                    f"{num_cpus}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.head = "127.0.0.2"
        for i in range(1 + num_nodes):
            self.add_node(f"127.0.0.{2 + i}")

    def __enter__(self) -> SimulatedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        finally:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def add_node(self, host: str) -> None:
        self._say(f"add {host}")

    def lose_node(self, host: str) -> None:
        """End a node as a power loss would. Not the head, which the driver is connected to."""
        self._say(f"lose {host}")

    def restart_store(self) -> None:
        """End the global control store by SIGKILL, and start it again."""
        self._say("restart-store")

    def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(command, file=self._process.stdin, flush=True)
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(Path(self._folder, "nodes.log").read_text())
