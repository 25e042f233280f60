"""Processes that only receive bytes, by TCP or by gRPC: the limits of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kvplane.wire.protocol import MAX_MESSAGE_BYTES

from .. import push_pb2
from ..chunks import CHUNK_BYTES
from ..stubs import PEERS, method


def tcp_sink(pipe: Connection) -> None:
    """Receive messages of announced lengths, and answer each with one byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while header := connection.recv(8, socket.MSG_WAITALL):
                buffer = memoryview(bytearray(int.from_bytes(header, "little")))
                while buffer:
                    buffer = buffer[connection.recv_into(buffer) :]
                connection.sendall(b"!")


def _drop(requests: Iterator[Any], context: Any) -> Any:
    return push_pb2.PushBlocksResponse(num_bytes=sum(1 for _ in requests))


def grpc_sink(pipe: Connection) -> None:
    """Receive and drop messages until the pipe has something."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.server(ThreadPoolExecutor(1), options=options)
    drop = grpc.stream_unary_rpc_method_handler(
        _drop,
        push_pb2.PushBlocksRequest.FromString,
        push_pb2.PushBlocksResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(PEERS.full_name, {"PushBlocks": drop})
    server.add_generic_rpc_handlers((handler,))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    server.stop(0).wait()


@contextmanager
def sink(take: Callable[[Connection], None]) -> Iterator[Any]:
    """Run a process that receives bytes; yield the first object that it sends: its port."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=take, args=(there,), daemon=True)
    process.start()
    yield here.recv()
    here.send("end")
    process.join(10)
    process.kill()


def by_tcp(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "little"))
    connection.sendall(data)
    connection.recv(1)


def by_grpc(channel: grpc.Channel, data: bytes) -> None:
    view = memoryview(data)
    chunks = (
        push_pb2.PushBlocksRequest(
            chunk=push_pb2.BlockChunk(data=bytes(view[at : at + CHUNK_BYTES]))
        )
        for at in range(0, len(data), CHUNK_BYTES)
    )
    method(channel, "PushBlocks")(chunks)
