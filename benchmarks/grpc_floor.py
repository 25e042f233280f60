"""Measures what gRPC itself costs: streams of messages that a server of Python sends back.

    python -m benchmarks.grpc_floor [--streams N] [--rounds N] [--seconds S]

Server and client are processes of their own, on uvloop as ours are. Servers of ``grpc.aio`` and of
``grpc`` (a thread for each stream) take turns, each with and without gRPC's EventEngine; the client
is ``grpc.aio`` and has what the server has. The best round of each variant, by its median, is
printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from benchmarks.common.timing import quantile

METHOD = "/floor.Echo/Echo"
MESSAGE = bytes(500)
# gRPC's own default, and the control plane's setting.
EXPERIMENTS = {"on": "event_engine_client", "off": "-event_engine_client,-event_engine_listener"}
Result = tuple[float, float, float, float, float]


class _Echo(grpc.GenericRpcHandler):
    def __init__(self, handler: Any) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(handler)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler


async def _serve_aio() -> None:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server(handlers=[_Echo(echo)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def _serve_sync() -> None:
    def echo(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from requests

    server = grpc.server(ThreadPoolExecutor(256), handlers=[_Echo(echo)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


async def _drive(port: int, num_streams: int, seconds: float) -> list[float]:
    """Return the seconds of each round trip. Each stream sends again when it has the answer."""
    latencies_s: list[float] = []

    async def stream(channel: grpc.aio.Channel, end_s: float) -> None:
        call: Any = channel.stream_stream(METHOD)()
        while (began_s := time.perf_counter()) < end_s:
            await call.write(MESSAGE)
            await call.read()
            latencies_s.append(time.perf_counter() - began_s)
        await call.done_writing()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await stream(channel, time.perf_counter() + 0.2)
        latencies_s.clear()
        end_s = time.perf_counter() + seconds
        await asyncio.gather(*[stream(channel, end_s) for _ in range(num_streams)])
    return latencies_s


def _used(pid: int) -> tuple[float, int]:
    """Return the CPU seconds of a process's threads, and their number of context switches."""
    seconds, switches = 0.0, 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
        lines = (thread / "status").read_text().splitlines()
        switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return seconds, switches


def _measure(server: str, event_engine: str, num_streams: int, seconds: float) -> Result:
    """Return median and 99th percentile in us, messages a second, and for each message the server's
    us of CPU and its context switches.
    """
    environ = {**os.environ, "GRPC_EXPERIMENTS": EXPERIMENTS[event_engine]}
    program = [sys.executable, "-m", "benchmarks.grpc_floor", "--role"]
    process = subprocess.Popen(
        [*program, server], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        cpu_s, switches = _used(process.pid)
        client = [*program, "client", port, str(num_streams), str(seconds)]
        done = subprocess.run(client, env=environ, check=True, capture_output=True, text=True)
        cpu_end_s, switches_end = _used(process.pid)
    finally:
        process.kill()
        process.wait()
    latencies_s = [float(line) for line in done.stdout.split()]
    num = len(latencies_s)
    p50, p99 = (1e6 * quantile(latencies_s, q) for q in (0.5, 0.99))
    cpu_us = 1e6 * (cpu_end_s - cpu_s) / num
    return p50, p99, num / seconds, cpu_us, (switches_end - switches) / num


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what gRPC costs.")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        _play(*arguments.role)
        return
    results: dict[tuple[str, str], list[Result]] = {}
    for _ in range(arguments.rounds):
        for server in ("aio", "sync"):
            for event_engine in EXPERIMENTS:
                result = _measure(server, event_engine, arguments.streams, arguments.seconds)
                results.setdefault((server, event_engine), []).append(result)
    print("server  EventEngine  p50 us  p99 us  messages/s  server CPU us  context switches")
    for (server, event_engine), rounds in results.items():
        p50, p99, rate, cpu_us, switches = min(rounds)
        print(
            f"{server:6}  {event_engine:11}  {p50:6.0f}  {p99:6.0f}  {rate:10,.0f}"
            f"  {cpu_us:13.0f}  {switches:16.1f}"
        )


def _play(role: str, *options: str) -> None:
    if role == "aio":
        uvloop.run(_serve_aio())
    elif role == "sync":
        _serve_sync()
    else:
        port, num_streams, seconds = options
        for latency_s in uvloop.run(_drive(int(port), int(num_streams), float(seconds))):
            print(latency_s)


if __name__ == "__main__":
    main()
