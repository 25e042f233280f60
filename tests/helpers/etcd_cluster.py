"""etcd on loopback: members that a test can kill, stop and continue."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

from tests.helpers.programs import printed
from tests.helpers.tools import needs
from tests.helpers.waiting import wait_until


class EtcdCluster:
    """``with EtcdCluster(folder, 3) as etcd``: ready when entered. ``tls``: folder of ca.pem and
    server.pem with its key, for members that clients have to show a certificate.
    """

    def __init__(self, folder: Path, num_members: int, tls: Path | None = None) -> None:
        """Skips the test where there is no etcd."""
        needs("etcd", "etcdctl")
        self._folder = folder
        self._scheme = "http" if tls is None else "https"
        self._tls: list[str] = []
        if tls is not None:
            self._tls = ["--client-cert-auth", "--trusted-ca-file", f"{tls}/ca.pem"]
            self._tls += ["--cert-file", f"{tls}/server.pem", "--key-file", f"{tls}/server.key"]
        with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(3 * num_members)]
        ports = [each.getsockname()[1] for each in with_ports]
        for each in with_ports:
            each.close()
        self.clients, self._peers, self._health = (
            ports[i : i + num_members] for i in range(0, len(ports), num_members)
        )
        self.members: list[subprocess.Popen[bytes]] = []

    @property
    def endpoints(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.clients)

    def __enter__(self) -> EtcdCluster:
        cluster = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers))
        ports = zip(self.clients, self._peers, self._health, strict=True)
        for i, (client, peer, health) in enumerate(ports):
            with (self._folder / f"etcd{i}.log").open("wb") as log:
                command = [
                    "etcd", "--name", f"m{i}", "--data-dir", str(self._folder / f"m{i}.etcd"),
                    "--listen-client-urls", f"{self._scheme}://127.0.0.1:{client}",
                    "--advertise-client-urls", f"{self._scheme}://127.0.0.1:{client}",
                    "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                    "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                    "--initial-cluster", cluster, "--logger", "zap",
                    "--listen-metrics-urls", f"http://127.0.0.1:{health}", *self._tls,
                ]  # fmt: skip
                self.members.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        wait_until(lambda: all(self._is_healthy(port) for port in self._health), 30)
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.send_signal(signal.SIGCONT)
            member.kill()
        for member in self.members:
            member.wait()

    def kill_raft_leader(self) -> None:
        for member, port in zip(self.members, self.clients, strict=True):
            command = ["etcdctl", "--endpoints", f"127.0.0.1:{port}", "endpoint", "status", "-w"]
            said = printed(*command, "json", env={"ETCDCTL_API": "3"})
            status = json.loads(said)[0]["Status"]
            if status["leader"] == status["header"]["member_id"]:
                member.kill()
                member.wait()
                return
        raise AssertionError("no member leads")

    def _is_healthy(self, port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                return json.load(answer)["health"] == "true"
        except OSError:
            return False
