"""The process that has a simulated Ray cluster: `SimulatedCluster` starts and commands it.

A line of its input is a command and its argument; each is answered by a line. It ends with its
input. It is a separate process because Ray forks, which a process with threads of torch and gRPC
does not survive.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 << 20


def main(folder: str, num_cpus: int) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    cluster, nodes = Cluster(), dict[str, Any]()
    for line in sys.stdin:
        command, _, host = line.strip().partition(" ")
        if command == "add":
            only_head = {} if nodes else {"include_dashboard": False, "temp_dir": folder}
            nodes[host] = cluster.add_node(
                wait=bool(nodes),
                num_cpus=num_cpus if nodes else 1,
                node_ip_address=host,
                object_store_memory=OBJECT_STORE_BYTES,
                **only_head,
            )
        elif command == "lose":
            cluster.remove_node(nodes.pop(host), allow_graceful=False)
        elif command == "restart-store":
            cluster.head_node.kill_gcs_server()
            cluster.head_node.start_gcs_server()
        print(cluster.address, file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
