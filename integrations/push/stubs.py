"""Callers and handlers of the services in push.proto, as generated code has them. What protoc makes
imports the messages by the one name that the package has in the tree.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from . import push_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["PushService"]
PEERS = pb.DESCRIPTOR.services_by_name["BlockPushService"]


def method(channel: Any, name: str) -> Any:
    """A method of either service on a channel of ``grpc`` or ``grpc.aio``."""
    called = _descriptor(name)
    kind = channel.stream_unary if called.client_streaming else channel.unary_unary
    answers = GetMessageClass(called.output_type).FromString
    return kind(path(name), request_serializer=_serialized, response_deserializer=answers)


def path(name: str) -> str:
    """As gRPC names a method."""
    return f"/{_descriptor(name).containing_service.full_name}/{name}"


def add_unary(servicer: Any, server: Any) -> None:
    """Have a server of ``grpc.aio`` call the methods of ``servicer``, which are those of
    ``PushService``.
    """
    handlers = {
        each.name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, each.name), GetMessageClass(each.input_type).FromString, _serialized
        )
        for each in SERVICE.methods
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),)
    )


def _descriptor(name: str) -> MethodDescriptor:
    found: MethodDescriptor = {**SERVICE.methods_by_name, **PEERS.methods_by_name}[name]
    return found


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
