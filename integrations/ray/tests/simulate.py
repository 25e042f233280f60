"""A fleet on simulated machines that loses its leader, a shard and a machine while it answers.

    make fleet

Two pools of two shards and two control planes run on a Ray cluster of four nodes. Beside them run
three members of etcd, an engine for each pool and a router, all on this machine, in a network of
their own. Clients ask the router questions, several at a time. Their answers must be those of an
engine that loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common.report import cpu_name
from benchmarks.takeover import leader_of, until_another_leads
from engine import LLM
from integrations.ray.tests.ray_cluster import SimulatedCluster
from integrations.ray.tests.simulated_clients import Answer, Clients
from kvplane.integrations.ray import fleet
from kvplane.integrations.ray.placement import FleetShape
from kvplane.integrations.ray.server_actor import Status
from kvplane.integrations.ray.server_process import ServerProcess
from models.recall_task import Question, questions
from tests.helpers.etcd_cluster import EtcdCluster

MODEL = Path(__file__).parents[3] / "models" / "recall"
ROUTER = "kvplane.integrations.router"
POOLS = ("pool-0", "pool-1")
NODE_CPUS = 3  # room for a pool and a control plane, and on all nodes for one pool more
UP_S = 180.0
ANSWERS_BETWEEN = 6  # of each engine, between two losses
# Of fifteen questions each, more than are answered: while one engine is away the other caches its
# questions, and the router would send none of these to the one that is back.
NUM_SETS = 10


class Programs:
    """The programs outside of the cluster, on loopback: an engine for each pool, and the router."""

    def __init__(self, stack: ExitStack, addresses: str) -> None:
        self._stack = stack
        self._control = ("--control-plane", addresses, "--log-level", "error")

    def start(self) -> str:
        """Return the router's URL, once it has engines to send requests to."""
        recovery = ("--timeout-s", "5", "--recovery-timeout-s", str(UP_S))
        more = ("--num-threads", "1", "--no-probe", *recovery, *self._control)
        engines = [
            self._run("engine", "serve", "--model", str(MODEL), "--pool-id", pool, *more)
            for pool in POOLS
        ]
        listed = [f"{_url(engine)}={pool}" for engine, pool in zip(engines, POOLS, strict=True)]
        reads = ("--tokenizer", str(MODEL))
        router = _url(self._run(ROUTER, "--engine", ",".join(listed), *reads, *self._control))
        print(f"{'router':<16} {router} before {' and '.join(listed)}")
        return router

    def _run(self, *program: str) -> ServerProcess:
        process = ServerProcess(
            lambda port_file: [
                *(sys.executable, "-m", *program),
                *("--bind", "127.0.0.1:0", "--port-file", str(port_file)),
            ],
            ended=lambda: print(f"{program[0]} has ended"),
        )
        self._stack.callback(process.stop)
        return process


def _url(program: ServerProcess) -> str:
    """Wait until it serves; return its URL."""
    end_s = time.monotonic() + UP_S
    while not (port := program.port):
        if time.monotonic() >= end_s:
            raise TimeoutError("a program does not come up")
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}"


def answers(addresses: str, asked: list[Question]) -> dict[str, str]:
    """Return an engine's answers to the prompts; its pool is in its process and loses nothing."""
    alone = {"data_plane": "embedded", "pool_id": "alone", "num_device_blocks": 256}
    alone |= {"dtype": "float32", "probe": False}
    with LLM(MODEL, control_plane=addresses, num_threads=1, **alone) as llm:
        outputs = llm.generate([each.prompt for each in asked], [each.params for each in asked])
    return {
        question.prompt: output.outputs[0].text
        for question, output in zip(asked, outputs, strict=True)
    }


def find(name: str) -> Status:
    """Wait for a server that is up; return it."""
    end_s = time.monotonic() + UP_S
    while time.monotonic() < end_s:
        for each in fleet.status():
            if each.name == name and each.address:
                return each
        time.sleep(0.1)
    raise TimeoutError(f"{name} is not up")


def lose_all(cluster: SimulatedCluster, addresses: str, clients: Clients) -> None:
    """Lose the leader, a shard and a machine, one after another, and print how long each took."""

    def report(what: str, took_s: float, until: str) -> None:
        print(f"{what:<46} {took_s:>7.3f} s until {until}", flush=True)

    def answer_on() -> None:
        since_s = time.monotonic()
        for pool in POOLS:
            clients.wait_for(ANSWERS_BETWEEN, pool, since_s, UP_S)

    answer_on()
    control = [find(f"control-{i}") for i in range(2)]
    leader = control[asyncio.run(leader_of([each.address for each in control]))]
    took_s = asyncio.run(
        until_another_leads(addresses, lambda: os.kill(leader.pid, signal.SIGKILL))
    )
    report(f"leader {leader.name} on {leader.node} killed", took_s, "the next one answers")
    answer_on()
    for pool, shard, is_node in ((POOLS[0], 1, False), (POOLS[1], 0, True)):
        at = find(f"{pool}-shard-{shard}")
        began_s = time.monotonic()
        if is_node:
            cluster.lose_node(at.node)
        else:
            os.kill(at.actor_pid, signal.SIGKILL)
        clients.wait_for(1, pool, time.monotonic(), UP_S)  # asked of it when it was lost already
        took_s = time.monotonic() - began_s
        num_others = clients.num_answers(next(each for each in POOLS if each != pool), began_s)
        lost = f"node {at.node} with {pool}" if is_node else f"{at.name} on {at.node}"
        report(
            f"{lost} {'lost' if is_node else 'killed'}",
            took_s,
            f"its engine answers; meanwhile {num_others} answers of the other",
        )
        answer_on()


def report_answers(answers: Sequence[Answer]) -> int:
    """Return the exit code: 0 when all answers are right."""
    for pool in POOLS:
        cached = [each.num_cached_tokens for each in answers if each.pool == pool]
        print(f"{pool}: {len(cached)} answers, {sum(cached)} tokens of prompts cached there")
    num_same = sum(each.is_expected for each in answers)
    print(f"identical answers: {num_same}/{len(answers)}")
    return 0 if num_same == len(answers) > 0 else 1


def main() -> int:
    began_s = time.monotonic()
    asked = [each for i in range(NUM_SETS) for each in questions(i, quick=True) if each.is_greedy]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfleet-")))
        etcd = stack.enter_context(EtcdCluster(folder, 3))
        cluster = stack.enter_context(SimulatedCluster(3, NODE_CPUS))
        fleet.connect(cluster.address)
        stack.callback(fleet.disconnect)
        shape = FleetShape(
            pools=len(POOLS),
            shards=2,
            control_planes=2,
            election=f"etcd://{etcd.endpoints}/fleet",
            data=f"--model {MODEL} --dtype float32 --num-device-blocks 256",
            timeout_s=UP_S,
        )
        addresses = ",".join(fleet.up(shape))
        stack.callback(fleet.down)
        for each in fleet.status():
            print(f"{each.name:<16} {each.address}")
        expected = answers(addresses, asked)
        router = Programs(stack, addresses).start()
        print(f"up after {time.monotonic() - began_s:.0f} s on this machine: {cpu_name()}")
        with Clients(router, MODEL.name, asked, expected) as clients:
            lose_all(cluster, addresses, clients)
    print(f"{time.monotonic() - began_s:.0f} s in all")
    return report_answers(clients.answers)


if __name__ == "__main__":
    sys.exit(main())
