"""A peer of NIXL that takes nothing holds up its own pushes alone, and these go by gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from two_pools import NUM_BLOCKS, PROMPT, SEQUENCE, Side, two_pools

from data_plane.server.push import chunks, receiver
from data_plane.server.push.nixl import outgoing, process
from data_plane.server.push.nixl.outgoing import Outgoing
from data_plane.server.push.nixl.process import AgentProcess
from data_plane.server.push.nixl.staging import Staging
from kvplane import PrefixMover
from kvplane.errors import KvplaneError, PlaneUnavailableError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
AUTO = {"push_transfer": "auto"}
PATIENCE_S = 60.0
SLOT_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes by shared memory needs no help of the peer, so it does not stall."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def ready(stack: ExitStack, num_pushes: int) -> Staging:
    staging = stack.enter_context(closing(Staging(num_pushes, SLOT_BYTES, only_loopback=True)))
    staging._running().wait_until_ready(PATIENCE_S)
    return staging


@contextmanager
def stopped(agent: AgentProcess) -> Iterator[None]:
    agent._process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent._process.send_signal(signal.SIGCONT)


def filled(byte: bytes) -> memoryview:
    return memoryview(byte * SLOT_BYTES)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_peer_that_hangs_holds_up_nobody_else_and_is_left_alone_until_it_goes_on() -> None:
    with ExitStack() as stack:
        sender, hanging, living = (ready(stack, num_pushes) for num_pushes in (3, 2, 1))
        told, told_too = (stack.enter_context(hanging.incoming()).message for _ in range(2))
        incoming = stack.enter_context(living.incoming())
        stuck, other_push = (stack.enter_context(sender.outgoing(to)) for to in (told, told_too))
        to_living = stack.enter_context(sender.outgoing(incoming.message))
        agent = sender._running()
        with stopped(hanging._running()):
            writing = stack.enter_context(ThreadPoolExecutor(1)).submit(
                stuck.write, 0, filled(b"a")
            )
            for number in range(20):
                to_living.write(number % 3, filled(b"%d" % (number % 10)))
                assert bytes(incoming.read(number % 3, 1)) == b"%d" % (number % 10)
            assert not writing.done(), "the others waited for the one that hangs"
            with pytest.raises(PlaneUnavailableError, match="took nothing"):
                await asyncio.wrap_future(writing)
            begun: list[int] = []
            with pytest.MonkeyPatch.context() as patch:
                begin = AgentProcess.begin
                patch.setattr(
                    AgentProcess,
                    "begin",
                    lambda self, kind, body=b"": begun.append(kind) or begin(self, kind, body),
                )
                for push in (stuck, other_push):
                    with pytest.raises(PlaneUnavailableError, match="an earlier write"):
                        push.write(1, filled(b"b"))
                assert not begun, "the peer was tried again"
            to_living.write(0, filled(b"c"))
        assert stuck.stalled is not None
        await asyncio.wrap_future(stuck.stalled)
        other_push.write(1, filled(b"d"))
        assert sender._running() is agent


async def test_memory_that_is_being_sent_from_is_given_to_no_other_push() -> None:
    with ExitStack() as stack:
        sender, hanging, living = (ready(stack, num_pushes) for num_pushes in (2, 2, 1))
        told, told_too = (stack.enter_context(hanging.incoming()).message for _ in range(2))
        incoming = stack.enter_context(living.incoming())
        with stopped(hanging._running()):
            with sender.outgoing(told) as stuck, pytest.raises(PlaneUnavailableError):
                stuck.write(0, filled(b"a"))
            for _ in range(2):  # which share comes first is not said
                with sender.outgoing(incoming.message) as to_living:
                    assert to_living._begin != stuck._begin
                    to_living.write(0, filled(b"b"))
            with pytest.raises(PlaneUnavailableError, match="an earlier write"):
                stack.enter_context(sender.outgoing(told_too))
        await until(lambda: sender._free[False] == {0, 1})
        assert bytes(stuck._slots[0]) == bytes(filled(b"a"))
        with sender.outgoing(told_too) as again:
            again.write(0, filled(b"c"))


async def test_an_agent_that_has_nothing_but_stalled_writes_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data_plane.server.push.nixl.staging._RESTART_S", 0.0)
    with ExitStack() as stack:
        sender, hanging, living = (ready(stack, 1) for _ in range(3))
        told = stack.enter_context(hanging.incoming()).message
        incoming = stack.enter_context(living.incoming())
        agent = sender._running()
        with stopped(hanging._running()):
            with sender.outgoing(told) as stuck, pytest.raises(PlaneUnavailableError):
                stuck.write(0, filled(b"a"))
            with sender.incoming():
                with pytest.raises(KvplaneError, match="in use"):
                    stack.enter_context(sender.outgoing(incoming.message))
                assert not agent.has_ended, "somebody writes to it"
            with pytest.raises(KvplaneError, match="in use"):
                stack.enter_context(sender.outgoing(incoming.message))
            await until(lambda: sender._free[False] == {0})
            sender._running().wait_until_ready(PATIENCE_S)
            with sender.outgoing(incoming.message) as to_living:
                to_living.write(0, filled(b"b"))
        assert sender._running() is not agent


def test_what_stalls_does_not_keep_a_data_plane_from_stopping() -> None:
    with ExitStack() as stack:
        hanging = ready(stack, 1)
        told = stack.enter_context(hanging.incoming()).message
        stack.enter_context(stopped(hanging._running()))
        sender = ready(stack, 1)
        with sender.outgoing(told) as stuck, pytest.raises(PlaneUnavailableError):
            stuck.write(0, filled(b"a"))


def agent_of(side: Side) -> AgentProcess:
    assert side.plane.push is not None
    staging = side.plane.push._staging
    assert staging is not None
    agent = staging._running()
    agent.wait_until_ready(PATIENCE_S)
    return agent


async def test_blocks_for_a_peer_that_hangs_go_by_grpc_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    async with two_pools(tmp_path, here_settings=AUTO, **AUTO) as pools:
        here, there = pools.here, pools.there
        sending, hanging = agent_of(here), agent_of(there)
        write, num_writes = Outgoing.write, 0

        def stop(self: Outgoing, slot: int, data: memoryview) -> None:
            nonlocal num_writes
            num_writes += 1
            if num_writes == 3:
                hanging._process.send_signal(signal.SIGSTOP)
            write(self, slot, data)

        monkeypatch.setattr(Outgoing, "write", stop)
        async with PrefixMover(here.session, there.session) as mover:
            await mover.move(SEQUENCE, PROMPT, max_total_tokens=64)
        assert await there.num_cached() == 24
        read = [
            (await s.data.read_blocks(s.session.grant, SEQUENCE, num_blocks=NUM_BLOCKS - 1)).blocks
            for s in (here, there)
        ]
        assert read[0] == read[1]
        assert num_writes == 3, "the peer was tried again"
        assert agent_of(here) is sending
        assert not sending.has_ended
        await until(lambda: hanging.has_ended)  # it did not answer its own data plane


def test_a_receiver_waits_longer_than_a_sender_needs_to_give_nixl_up() -> None:
    assert process.CALL_S + outgoing.WRITE_S + process.CALL_S < receiver.STALL_S


def test_an_agent_that_hangs_itself_is_ended() -> None:
    with ExitStack() as stack:
        sender, living = (ready(stack, 1) for _ in range(2))
        incoming = stack.enter_context(living.incoming())
        with sender.outgoing(incoming.message) as to_living:
            agent = sender._running()
            agent._process.send_signal(signal.SIGSTOP)
            with pytest.raises(PlaneUnavailableError, match="did not answer"):
                to_living.write(0, filled(b"a"))
        assert agent._process.wait(PATIENCE_S) == -signal.SIGKILL


def test_the_agent_gets_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVPLANE_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    passed = {"UCX_MAX_RNDV_RAILS", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "MLX5_SINGLE_THREADED"}
    for name in passed:
        monkeypatch.setenv(name, "1")
    with ExitStack() as stack:
        agent = ready(stack, 1)._running()
        environment = Path(f"/proc/{agent._process.pid}/environ").read_bytes()
    assert b"secret" not in environment
    names = {each.partition(b"=")[0].decode() for each in environment.split(b"\0")} - {""}
    assert {"PATH", "UCX_TLS", "UCX_NET_DEVICES"} | passed <= names
    assert names <= set(os.environ) | {"UCX_NET_DEVICES", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"}
