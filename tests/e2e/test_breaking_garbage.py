"""Raw bytes and absurd values, into every call of both planes: a typed answer, and all goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_planes import POOL, Pair, save_byte_model
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine import LLM, SamplingParams
from kvplane.errors import REASONS
from kvplane.v1 import execution_pb2, prefix_pb2, session_pb2, session_pb2_grpc, types_pb2

NUM_MESSAGES = 20  # of each kind, for each call
_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31), 7),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63), 2**32, 3),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 127, 128, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1, 2**63),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 77, -1),
}
_METHODS = [
    method
    for file in (session_pb2, prefix_pb2, execution_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


class Fuzz:
    """Messages of extremes; ``good`` gives values that are right where a field's name is known."""

    def __init__(self, seed: str, good: dict[str, Any]) -> None:
        self._random = random.Random(seed)
        self._good = good

    def message(self, cls: type[Message], depth: int = 0) -> Message:
        message = cls()
        for field in cls.DESCRIPTOR.fields:
            if self._random.random() < 0.25:
                continue
            if field.containing_oneof and message.WhichOneof(field.containing_oneof.name):
                continue
            if field.containing_oneof and self._random.random() < 0.6:
                continue
            self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.name in self._good and self._random.random() < 0.7:
            value = self._good[field.name]
            if isinstance(value, Message) and field.message_type == value.DESCRIPTOR:
                getattr(message, field.name).CopyFrom(value)
                return
            if isinstance(value, list) and field.is_repeated:
                getattr(message, field.name).extend(value)
                return
            if not isinstance(value, Message | list) and field.message_type is None:
                setattr(message, field.name, value)
                return
        if field.is_repeated:
            values = [self._value(field, depth) for _ in range(self._random.choice((0, 1, 2, 5)))]
            getattr(message, field.name).extend([v for v in values if v is not None])
        elif field.message_type is not None:
            value = self._value(field, depth)
            if value is not None:
                getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, self._value(field, depth))

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        if field.message_type is not None:
            return (
                self.message(GetMessageClass(field.message_type), depth + 1) if depth < 5 else None
            )
        kind = field.cpp_type
        if kind in _WHOLE:
            return self._random.choice(_WHOLE[kind])
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return self._random.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
        if field.type == FieldDescriptor.TYPE_BYTES:
            size = self._random.choice((0, 1, 3, 4, 16, 32, 64, 4096))
            return self._random.randbytes(size)
        return self._random.choice(("", "x", "pool", "no:where", "\0\n", "é" * 40, "y" * 5000))

    def garbage(self, good: bytes) -> bytes:
        """``good`` cut short, with bytes changed, or nothing of it."""
        data = bytearray(good[: self._random.randint(0, len(good))])
        for _ in range(self._random.randint(0, 4)):
            if data:
                data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data) + self._random.randbytes(self._random.choice((0, 0, 3)))


def reason_of(error: grpc.RpcError) -> str:
    status: Any = rpc_status.from_call(error)
    assert status is not None, f"no details: {error}"
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    raise AssertionError(f"no reason: {error}")


def tell(channel: grpc.Channel, method: MethodDescriptor, payloads: list[bytes]) -> list[bytes]:
    """The raw answers. Raises what is no typed error."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        call = channel.stream_stream(path)(iter(payloads), timeout=20)
        answers: list[bytes] = []
        try:
            answers.extend(call)
        except grpc.RpcError as error:
            check(error, path)
        return answers
    answers = []
    for payload in payloads:
        try:
            answers.append(channel.unary_unary(path)(payload, timeout=20))
        except grpc.RpcError as error:
            check(error, path)
    return answers


def check(error: Any, path: str) -> None:
    reason = reason_of(error)
    assert reason in REASONS, f"{path}: {error}"
    assert reason not in ("INTERNAL", "DEADLINE_EXCEEDED"), f"{path}: {error}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(model, tmp_path_factory.mktemp("logs"), lease_s=4.0) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: Path, pair: Pair) -> Iterator[LLM]:
    with LLM(model, control_plane=pair.control.address, pool_id=POOL, timeout_s=30.0) as opened:
        yield opened


def usage_is_sound(llm: LLM) -> None:
    for tier in llm.get_pool().usage:
        parts = (
            tier.num_free_blocks, tier.num_cached_blocks, tier.num_held_blocks,
            tier.num_retired_blocks,
        )  # fmt: skip
        assert min(parts) >= 0 and sum(parts) == tier.num_blocks


@pytest.mark.parametrize("method", _METHODS, ids=lambda m: m.name)
def test_garbage_gets_a_typed_answer_and_both_planes_go_on(
    llm: LLM, pair: Pair, method: MethodDescriptor
) -> None:
    is_control = method.containing_service.name not in ("ExecutionService", "BlockService")
    address = pair.control.address if is_control else pair.data.address
    with grpc.insecure_channel(pair.control.address) as control:
        stub = session_pb2_grpc.SessionServiceStub(control)
        layout = types_pb2.Layout.FromString(llm.get_pool().layout.to_proto().SerializeToString())
        opened = stub.OpenSession(session_pb2.OpenSessionRequest(pool_id=POOL, layout=layout))
        admit = session_pb2.Admit(sequence_id=1, token_ids=[0] * 20)
        step = session_pb2.StepRequest(
            session=opened.session, number=1, operations=[session_pb2.Operation(admit=admit)]
        )
        admitted = stub.Step(step)
        good = {
            "session": opened.session,
            "grant": opened.grant,
            "plan": admitted.plan,
            "layer": 0,
            "number": 2,
            "sequence_id": 1,
            "sequence_ids": [1],
            "first_positions": [20],
            "num_slots": [1],
            "num_tokens": [1],
            "token_ids": [7],
        }
        fuzz = Fuzz(method.name, good)
        cls = GetMessageClass(method.input_type)
        with grpc.insecure_channel(address) as channel:
            for _ in range(NUM_MESSAGES):
                messages = [fuzz.message(cls).SerializeToString() for _ in range(3)]
                tell(channel, method, messages)
                tell(channel, method, [fuzz.garbage(messages[0])])
        stub.CloseSession(session_pb2.CloseSessionRequest(session=opened.session))
    usage_is_sound(llm)
    (output,) = llm.generate(["still there"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    usage_is_sound(llm)
