"""A fleet on simulated machines that loses its leader, a shard and a machine while it answers.

    make fleet

Two pools of two shards and two control planes on a Ray cluster of four nodes, three members of
etcd, and an engine for each pool, all on this machine, in a network of their own. The engines
answer the same questions again and again. What they said before anything was lost is what they must
say.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc.aio

from benchmarks.cpu import cpu_name
from demo.workload import Question, questions
from engine import LLM
from kvplane import ControlClient
from kvplane.clients.control_client import CONTROL_PLANE_SERVICE
from kvplane.errors import KvplaneError
from kvplane.ray import fleet
from kvplane.ray.placement import FleetShape
from kvplane.ray.server_actor import Status
from kvplane.transport.tls import open_channel
from kvplane.v1.control_pb2 import DescribeControlPlaneRequest
from kvplane.v1.control_pb2_grpc import ControlPlaneServiceStub
from tests.helpers.etcd_cluster import EtcdCluster
from tests.helpers.ray_cluster import SimulatedCluster

MODEL = Path(__file__).parents[1] / "models" / "recall"
POOLS = ("pool-0", "pool-1")
NODE_CPUS = 3  # room for a pool and a control plane, and on all nodes for one pool more
UP_S = 180.0
ANSWERS_BETWEEN = 6  # of each engine, between two losses


class Answering(threading.Thread):
    """An engine that answers until it is told to stop. ``different``: what it said otherwise than
    before.
    """

    def __init__(self, llm: LLM, asked: list[Question], expected: list[str]) -> None:
        super().__init__(daemon=True)
        self._llm = llm
        self._asked = itertools.cycle(zip(asked, expected, strict=True))
        self._stopping = threading.Event()
        self.num_answers = 0
        self.different: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                question, expected = next(self._asked)
                if answers(self._llm, [question]) != [expected]:
                    self.different.append(question.prompt)
                self.num_answers += 1
        except Exception as error:
            self.error = error

    def wait_for(self, num_more: int) -> None:
        """Until it has answered so many more questions. Raises what ended it."""
        wanted = self.num_answers + num_more
        while self.num_answers < wanted:
            if self.error is not None:
                raise self.error
            time.sleep(0.005)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def answers(llm: LLM, asked: list[Question]) -> list[str]:
    outputs = llm.generate([each.prompt for each in asked], [each.params for each in asked])
    return [output.outputs[0].text for output in outputs]


class TakeoverClock:
    """Asks who leads, with a channel that knows all control planes."""

    def __init__(self, addresses: str) -> None:
        self._addresses = addresses

    def leader(self, control: list[Status]) -> Status:
        """Which of them leads."""
        return asyncio.run(self._leader(control))

    def until_another_leads(self, end: Callable[[], None]) -> float:
        """Seconds from ``end``, which ends the leader, until the next one answers."""
        return asyncio.run(self._until_another_leads(end))

    async def _leader(self, control: list[Status]) -> Status:
        while True:
            for each in control:
                try:
                    async with ControlClient(each.address, timeout_s=0.5) as client:
                        await client.describe()
                        return each
                except KvplaneError:
                    continue

    async def _until_another_leads(self, end: Callable[[], None]) -> float:
        async with open_channel(self._addresses, None, health_of=CONTROL_PLANE_SERVICE) as channel:
            describe = ControlPlaneServiceStub(channel).DescribeControlPlane
            request = DescribeControlPlaneRequest()
            before = (await describe(request, wait_for_ready=True, timeout=30)).incarnation
            end()
            began_s = time.monotonic()
            while True:
                try:
                    now = (await describe(request, wait_for_ready=True, timeout=60)).incarnation
                except grpc.aio.AioRpcError:  # it was on its way to the one that has ended
                    continue
                if now > before:
                    return time.monotonic() - began_s


def find(name: str) -> Status:
    """A server that is up; waits until it is."""
    end_s = time.monotonic() + UP_S
    while time.monotonic() < end_s:
        for each in fleet.status():
            if each.name == name and each.address:
                return each
        time.sleep(0.1)
    raise TimeoutError(f"{name} is not up")


def lose_all(cluster: SimulatedCluster, addresses: str, engines: list[Answering]) -> None:
    """Lose the leader, a shard and a machine, one after another, and say how long each took."""
    clock = TakeoverClock(addresses)

    def report(what: str, took_s: float, until: str) -> None:
        print(f"{what:<46} {took_s:>7.3f} s until {until}", flush=True)

    def answer_on() -> None:
        for each in engines:
            each.wait_for(ANSWERS_BETWEEN)

    answer_on()
    leader = clock.leader([find(f"control-{i}") for i in range(2)])
    took_s = clock.until_another_leads(lambda: os.kill(leader.pid, signal.SIGKILL))
    report(f"leader {leader.name} on {leader.node} killed", took_s, "the next one answers")
    answer_on()
    for what, lose, hit in (
        (f"{POOLS[0]}-shard-1", lambda at: os.kill(at.actor_pid, signal.SIGKILL), engines[0]),
        (f"{POOLS[1]}-shard-0", lambda at: cluster.lose_node(at.node), engines[1]),
    ):
        at = find(what)
        began_s = time.monotonic()
        lose(at)
        hit.wait_for(2)  # the first may have been as good as done
        is_node = hit is engines[1]
        lost = f"node {at.node} with {POOLS[1]} lost" if is_node else f"{what} on {at.node} killed"
        report(lost, time.monotonic() - began_s, "its engine has answered twice")
        answer_on()


def main() -> int:
    began_s = time.monotonic()
    asked = [each for each in questions(0, quick=True) if each.is_greedy]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfleet-")))
        etcd = stack.enter_context(EtcdCluster(folder, 3))
        cluster = stack.enter_context(SimulatedCluster(3, NODE_CPUS))
        fleet.connect(cluster.address)
        stack.callback(fleet.disconnect)
        shape = FleetShape(
            num_pools=len(POOLS),
            num_shards=2,
            num_control_planes=2,
            election=f"etcd://{etcd.endpoints}/fleet",
            data_arguments=("--model", str(MODEL), "--num-device-blocks", "256"),
        )
        addresses = ",".join(fleet.up(shape, UP_S))
        stack.callback(fleet.down)
        settings = {"control_plane": addresses, "recovery_timeout_s": UP_S, "timeout_s": 5.0}
        llms = [
            stack.enter_context(LLM(MODEL, pool_id=pool, probe=False, num_threads=1, **settings))
            for pool in POOLS
        ]
        for each in fleet.status():
            print(f"{each.name:<16} {each.address}")
        print(f"up after {time.monotonic() - began_s:.0f} s on this machine: {cpu_name()}")
        expected = answers(llms[0], asked)
        engines = [Answering(llm, asked, expected) for llm in llms]
        for each in engines:
            each.start()
        try:
            lose_all(cluster, addresses, engines)
        finally:
            for each in engines:
                each.stop()
        sessions = sum(llm.stats.num_reopened_sessions for llm in llms)
    num = sum(each.num_answers for each in engines)
    num_same = num - sum(len(each.different) for each in engines)
    print(f"sessions opened again: {sessions}; {time.monotonic() - began_s:.0f} s in all")
    print(f"identical answers: {num_same}/{num}")
    return 0 if num_same == num else 1


if __name__ == "__main__":
    sys.exit(main())
