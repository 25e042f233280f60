"""Does grpcurl's work on a line of a shell: a call by reflection, its messages as JSON."""

from __future__ import annotations

import shlex
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

PROGRAM = ["grpcurl", "-plaintext"]


def lines_of(script: str) -> list[list[str]]:
    """Return the arguments of each command, without the program and -plaintext."""
    commands = [shlex.split(line) for line in script.replace("\\\n", "").splitlines()]
    assert all(command[:2] == PROGRAM for command in commands)
    return [command[2:] for command in commands]


def call(address: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a unary call. ``method``: "SERVICE/METHOD"."""
    with grpc.insecure_channel(address) as channel:
        service = _service(channel, method.partition("/")[0])
        described = service.FindMethodByName(method.partition("/")[2])
        asked, answered = map(
            message_factory.GetMessageClass, (described.input_type, described.output_type)
        )
        send = channel.unary_unary(
            f"/{method}",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )
        answer = send(json_format.ParseDict(request, asked()), timeout=30)
    as_json: dict[str, Any] = json_format.MessageToDict(answer, preserving_proto_field_name=True)
    return as_json


def methods_of(address: str, service: str) -> set[str]:
    """Return the names of a service's methods."""
    with grpc.insecure_channel(address) as channel:
        return {method.name for method in _service(channel, service).methods}


def _service(channel: grpc.Channel, name: str) -> Any:
    database = ProtoReflectionDescriptorDatabase(channel)
    return descriptor_pool.DescriptorPool(database).FindServiceByName(name)
