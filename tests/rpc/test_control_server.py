"""The control plane as a server: health, reflection, limits, metrics, TLS, starting and
stopping.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from control_plane.server.server import ControlPlaneServer
from kvplane import __version__, ops
from kvplane.serving import server as serving
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.attacked_planes import PlaneProcess
from tests.helpers.planes_in_process import control_plane
from tests.helpers.planning.control_wire import PATIENCE_S, RawSession, RawShard, Stub, stub_of
from tests.helpers.planning.registration_messages import LAYOUT
from tests.helpers.scrapes import fetch
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TLS = Path(__file__).parent / "tls"
ABOUT = pool_pb2.GetServerInfoRequest()
SERVICE = "kvplane.v1.SessionService"
# The first message of a Python client from before services had audiences, as it was sent: to
# OpenSession of ControlPlaneService, for the pool "default".
OF_AN_OLD_CLIENT = bytes.fromhex(
    "0a0764656661756c741204080210021a3c0a016d1010180120012a0f0a03616c6c12020001180220084001"
    "3220425ad140a1d853e9b0abc2627aa0d10e42d4309886d65a6486f5787f54f61de12206656e67696e65"
)
SERVICES = {
    "kvplane.v1.ServerService",
    "kvplane.v1.PoolService",
    "kvplane.v1.PrefixService",
    "kvplane.plane.v1.RegistrationService",
    SERVICE,
}


async def scrape(server: ControlPlaneServer) -> dict[str, float]:
    """Sample to value, as Prometheus would read them."""
    lines = (await asyncio.to_thread(fetch, server.metrics_port)).splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


async def test_health_is_told_for_each_service(control_server: ControlPlaneServer) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with grpc.aio.insecure_channel(control_server.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == serving
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(control_server: ControlPlaneServer) -> None:
    async with grpc.aio.insecure_channel(control_server.address) as channel:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        for service in SERVICES:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()
    assert {name for name in names if name.startswith("kvplane.")} == SERVICES
    assert "grpc.health.v1.Health" in names


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            "kvplane.v1.ControlPlaneService/OpenSession",
            f"this server speaks kvplane.v1 of release {__version__}, which has no "
            "ControlPlaneService/OpenSession: update the client, or the server if it is "
            "the older one",
        ),
        (
            "kvplane.v1.LaterService/Ask",
            f"this server speaks kvplane.v1 of release {__version__}, which has no "
            "LaterService/Ask: update the client, or the server if it is the older one",
        ),
        ("kvplane.push.v1.PushService/SendBlocks", "PushService is a plug-in's, which was not"),
    ],
)
async def test_a_caller_of_a_method_that_is_not_there_is_told_what_to_do(
    control_server: ControlPlaneServer, method: str, text: str
) -> None:
    async with grpc.aio.insecure_channel(control_server.address) as channel:
        call: Any = channel.unary_unary(f"/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(OF_AN_OLD_CLIENT)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (failure.value.details() or "").startswith(text)


async def test_truncated_and_garbage_requests_are_the_callers_error(
    control_server: ControlPlaneServer,
) -> None:
    request = pb.OpenSessionRequest(pool_id="pool", layout=LAYOUT.to_proto()).SerializeToString()
    async with grpc.aio.insecure_channel(control_server.address) as channel:
        for name in ("OpenSession", "Step", "ListSequences", "AbortPlans"):
            call: Any = channel.unary_unary(f"/{SERVICE}/{name}")
            for garbage in (b"\xff" * 20, request[:-1], b"\x0a\xff\xff\xff\xff\x7f"):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await call(garbage)
                assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = channel.stream_stream("/kvplane.plane.v1.RegistrationService/Register")()
        await call.write(b"\xff" * 20)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub_of(channel).GetServerInfo(ABOUT)).incarnation


async def test_the_metrics_tell_what_the_pools_and_the_steps_do(
    start_control_plane: Any, connect: Callable[[ControlPlaneServer], Stub]
) -> None:
    control_server = await start_control_plane(metrics_port=0)
    stub = connect(control_server)
    shard = await RawShard.joined(stub)
    session = await RawSession.open(stub, shard)
    prompt = list(range(1, 21))
    await session.admit(1, prompt)
    await session.submit()
    await session.admit(2, prompt)
    forged = session.receipts.pop()
    forged.signature = bytes(32)
    await session.step(ops.admit(2, prompt), ops.free([77, 78]), ops.admit(3, [1] * 1000))
    session.receipts = [forged]
    with pytest.raises(grpc.aio.AioRpcError):
        await session.submit()
    call: Any = stub.StreamSteps()
    step = pb.StepRequest(session=session.ref, number=77)
    await call.write(pb.StreamStepsRequest(step=step))
    assert (await call.read()).error.reason == "STEP_OUT_OF_ORDER"
    call.cancel()
    told = await scrape(control_server)
    assert_told(
        told,
        """
        blocks{pool="pool",state="held",tier="device"} 4
        blocks{pool="pool",state="free",tier="host"} 8
        sessions{pool="pool"} 1
        sequences{pool="pool",state="device"} 2
        registered_shards{pool="pool"} 1
        lookup_tokens_total{pool="pool"} 40
        hit_tokens_total{pool="pool",tier="device"} 16
        publications_total{pool="pool"} 2
        aborts_total{pool="pool"} 0
        swapped_blocks_total{direction="in",pool="pool"} 0
        operations_total{operation="admit",status="ok"} 2
        operations_total{operation="admit",status="failed"} 1
        operations_total{operation="admit",status="never"} 1
        operations_total{operation="free",status="failed"} 2
        tenant_items_total{status="failed",tenant="default"} 3
        tenant_sessions{tenant="default"} 1
        tenant_blocks{tenant="default"} 4
        plans_total 2
        step_duration_seconds_count 4
        rejections_total{reason="BAD_SIGNATURE"} 1
        rejections_total{reason="STEP_OUT_OF_ORDER"} 1
        rpc_handled_total{code="OK",method="/kvplane.v1.SessionService/Step"} 4
        rpc_handled_total{code="DATA_LOSS",method="/kvplane.v1.SessionService/Step"} 1
        rpc_duration_seconds_count{method="/kvplane.v1.SessionService/Step"} 5
        """,
    )
    incarnation = control_server.core.incarnation
    assert told[f'kvplane_control_plane_info{{incarnation="{incarnation}"}}'] == 1
    of_pool = re.compile(r'\{pool="pool"\}|pool="pool",|,pool="pool"')
    counters = {
        of_pool.sub("", name.removeprefix("kvplane_")): value
        for name, value in told.items()
        if of_pool.search(name) and "_seconds" not in name
    }
    answer = await stub.GetPoolCounters(pool_pb2.GetPoolCountersRequest(pool_id="pool"))
    assert dict(answer.counters) == counters, "a call tells the numbers of the metrics"
    shard.hang_up()


def assert_told(told: dict[str, float], wanted: str) -> None:
    """Assert that samples have these values: one a line, without the names' prefix."""
    samples = [line.rsplit(" ", 1) for line in wanted.split("\n") if line.strip()]
    expected = {f"kvplane_{name.strip()}": float(value) for name, value in samples}
    assert {name: told.get(name) for name in expected} == expected


async def test_the_containers_probe_asks_for_health_without_an_interpreter(
    start_control_plane: Any,
) -> None:
    server = await start_control_plane(metrics_port=0)
    probe = [str(ROOT / "deploy" / "healthy.sh"), str(server.metrics_port)]

    async def asked() -> int:
        return (await asyncio.to_thread(subprocess.run, probe, timeout=10)).returncode

    assert await asked() == 0
    server._set_serving(False)
    assert await asked() == 1
    server._set_serving(True)
    probe[1] = "1"  # nobody listens there
    assert await asked() == 1


async def test_an_expired_session_is_counted(
    start_control_plane: Any, connect: Callable[[ControlPlaneServer], Stub]
) -> None:
    server = await start_control_plane(lease_s=0.1, metrics_port=0)
    shard = await RawShard.joined(connect(server))
    await RawSession.open(connect(server), shard)
    async with asyncio.timeout(PATIENCE_S):
        while (await scrape(server))['kvplane_sessions_expired_total{pool="pool"}'] != 1:
            await asyncio.sleep(0.05)
    shard.hang_up()


async def test_stopping_answers_what_is_in_flight_and_ends_idle_streams_at_once(
    start_control_plane: Any, connect: Callable[[ControlPlaneServer], Stub]
) -> None:
    server = await start_control_plane(grace_s=30.0)
    stub = connect(server)
    shard = await RawShard.joined(stub)
    session = await RawSession.open(stub, shard)
    call: Any = stub.StreamSteps()
    step = pb.StepRequest(operations=[ops.admit(1, [1, 2])], **session.next())
    await call.write(pb.StreamStepsRequest(step=step))
    await asyncio.sleep(0)
    answer = await call.read()
    assert not answer.step.results[0].failures
    async with asyncio.timeout(PATIENCE_S):
        await server.stop()
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    failure = from_rpc_error(await shard.failure())
    assert (failure.reason, failure.retry_delay_s) == ("PLANE_UNAVAILABLE", 1.0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetServerInfo(ABOUT)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_in_flight_when_the_server_stops_is_answered_and_new_ones_are_refused() -> (
    None
):
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        entered.set()
        await release.wait()
        return request

    server = serving.build("127.0.0.1:0", max_message_bytes=4096)
    handlers = {"Slow": grpc.unary_unary_rpc_method_handler(slow)}
    server.grpc_server.add_registered_method_handlers("test.Service", handlers)
    await server.start(["test.Service"])
    async with grpc.aio.insecure_channel(server.address) as channel:
        method: Any = channel.unary_unary("/test.Service/Slow")
        in_flight = asyncio.ensure_future(method(b"hello"))
        await entered.wait()
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="test.Service"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(PATIENCE_S))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        async with grpc.aio.insecure_channel(server.address) as late:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await late.unary_unary("/test.Service/Slow")(b"late")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        release.set()
        assert await in_flight == b"hello"
        await asyncio.wait_for(stopping, PATIENCE_S)


def test_the_program_logs_its_settings_serves_and_stops_when_told(tmp_path: Path) -> None:
    with PlaneProcess("control_plane", tmp_path) as plane:
        with grpc.insecure_channel(plane.address) as channel:
            assert stub_of(channel).GetServerInfo(ABOUT, timeout=PATIENCE_S).incarnation
        plane.process.send_signal(signal.SIGTERM)
        assert plane.process.wait(PATIENCE_S) == 0
        lines = plane.log_file.read_text().splitlines()
    settings = next(line for line in lines if " settings " in line)
    assert "lease_s=30.0" in settings
    assert any(" listening " in line and f"address={plane.address}" in line for line in lines)
    assert "stopped" in lines[-1]


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("program", "code"),
    [("kvplane.integrations.router", 0), ("kvplane", 128), ("engine", 128)],
)
def test_a_program_that_imports_its_packages_ends_with_its_exit_code(
    program: str, code: int, stopped_by: signal.Signals
) -> None:
    # The signal comes from the program itself, when it imports the first package that it needs.
    script = (
        "import importlib.abc, os, runpy, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('click', 'grpc'):\n"
        f"            os.kill(os.getpid(), {int(stopped_by)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"runpy.run_module({program!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-c", script, "generate"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert ended.returncode == (code and code + stopped_by), ended.stderr.decode()


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, signal.SIGINT])
def test_the_program_can_be_stopped_while_it_starts(stopped_by: signal.Signals) -> None:
    command = [sys.executable, "-m", "control_plane", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b" settings " in process.stderr.readline()
        process.send_signal(stopped_by)
        assert process.wait(PATIENCE_S) == 0


def test_the_program_runs_without_standard_streams(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    flags = ["--bind", "127.0.0.1:0", "--metrics-port", "-1", "--port-file", str(port_file)]
    script = f"exec {sys.executable} -m control_plane {shlex.join(flags)} <&- >&- 2>&-"
    with subprocess.Popen(["sh", "-c", script], cwd=ROOT) as process:
        wait_until(port_file.exists, PATIENCE_S)
        with grpc.insecure_channel(f"127.0.0.1:{port_file.read_text().strip()}") as channel:
            assert stub_of(channel).GetServerInfo(ABOUT, timeout=PATIENCE_S).incarnation
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_tokens_in_the_clear_are_warned_of(
    host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = tmp_path / "access.toml"
    access.write_text("")
    async with control_plane(bind=f"{host}:0", insecure=True, access_file=access):
        assert ("can read the callers' tokens" in caplog.text) is (host == "0.0.0.0")


async def test_a_signal_is_waited_for_and_its_handler_given_back() -> None:
    waiting = asyncio.create_task(serving.wait_for_signal())
    await asyncio.sleep(0.01)
    before = signal.getsignal(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert before is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
