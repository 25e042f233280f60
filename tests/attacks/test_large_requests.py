"""Requests that hold a great deal of one thing: each is refused by name, an honest engine goes on
meanwhile, and the memory stays in bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import grpc
import pytest
from google.protobuf import duration_pb2

from kvplane.errors import InvalidRequestError, KvplaneError, QuotaExceededError
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.attacked_planes import (
    PATIENCE_S,
    HonestCaller,
    PlaneProcess,
    assert_calm,
    delimited,
    refusal,
)
from tests.helpers.planning.control_wire import stub_of
from tests.helpers.planning.registration_messages import LAYOUT, hello

MIB = 1 << 20
LARGE = 8 * MIB - 128
ATTACK_S = 0.3
# The largest request, as received, decoded, and read field by field.
MAX_GROWTH_BYTES = 8 * LARGE


def step(session: tpb.SessionRef, more: bytes) -> bytes:
    """A StepRequest that goes on with these fields."""
    return pb.StepRequest(session=session, number=1).SerializeToString() + more


def open_with(layout: bytes) -> bytes:
    request = pb.OpenSessionRequest(pool_id="pool")
    return request.SerializeToString() + delimited(2, layout)


def grouped(**fields: list[int] | list[float]) -> bytes:
    """A layout whose first group has these fields."""
    layout = LAYOUT.to_proto()
    for name, values in fields.items():
        getattr(layout.groups[0], name)[:] = values
    return layout.SerializeToString()


def groups(num: int) -> bytes:
    layout = LAYOUT.to_proto()
    return layout.SerializeToString() + delimited(5, b"") * num


def late_tokens(num: int) -> bytes:
    return pb.DeferredTokens(
        sequence_ids=struct.pack(f"<{num}q", *range(1, num + 1)),
        admitted_by=bytes(8 * num),
        first_positions=bytes(8 * num),
        num_tokens=bytes(4 * num),
    ).SerializeToString()


Request = Callable[[tpb.SessionRef], bytes]
# Method, request, and the field that the refusal names.
REFUSED: dict[str, tuple[str, Request, str]] = {
    "operations": ("Step", lambda s: step(s, b"\x1a\x00" * MIB), "operations"),
    "receipts": ("Step", lambda s: step(s, b"\x22\x00" * MIB), "receipts"),
    "messages of deferred tokens": ("Step", lambda s: step(s, b"\x2a\x00" * MIB), ""),
    "deferred tokens": (
        "Step",
        lambda s: step(s, delimited(5, late_tokens(100_000))),
        "deferred_tokens.sequence_ids",
    ),
    "fields of one operation": (
        "Step",
        lambda s: step(s, delimited(3, b"\x0a\x02\x08\x01" * (MIB // 2))),
        "operations",
    ),
    "operations to check": (
        "Step",
        lambda s: (
            pb.StepRequest(session=s, validate_only=True).SerializeToString() + b"\x1a\x00" * MIB
        ),
        "operations",
    ),
    "layers": (
        "OpenSession",
        lambda s: open_with(grouped(layers=[*range(10**6)])),
        "layout.groups.layers",
    ),
    "scales": (
        "OpenSession",
        lambda s: open_with(grouped(key_scales=[1.0] * 10**6)),
        "layout.groups.key_scales",
    ),
    "groups": ("OpenSession", lambda s: open_with(groups(10**6)), "layout.groups"),
    "unknown fields": ("OpenSession", lambda s: open_with(b"\xf8\x07\x01" * MIB), "layout"),
    "wire groups": ("OpenSession", lambda s: open_with(b"\xfb\x07\xfc\x07" * (MIB // 2)), "layout"),
    "pools to search": (
        "FindPrefix",
        lambda s: ppb.FindPrefixRequest(hashes=bytes(16), pool_ids=["pool"] * 500_000),
        "pool_ids",
    ),
    "a pool's name": (
        "GetPool",
        lambda s: pool_pb2.GetPoolRequest(pool_id="x" * LARGE),
        "pool_id",
    ),
    "a page's token": (
        "ListPools",
        lambda s: pool_pb2.ListPoolsRequest(page_token="x" * LARGE),
        "page_token",
    ),
    "a client's name": (
        "OpenSession",
        lambda s: pb.OpenSessionRequest(pool_id="pool", client_name="x" * LARGE),
        "client_name",
    ),
}
# What may be as long as a message: it is answered soon.
ANSWERED: dict[str, tuple[str, Request, None]] = {
    "tokens to search": (
        "FindPrefix",
        lambda s: ppb.FindPrefixRequest(token_ids=bytes(LARGE)),
        None,
    ),
    "hashes to search": ("FindPrefix", lambda s: ppb.FindPrefixRequest(hashes=bytes(LARGE)), None),
    "tokens to retain": (
        "RetainPrefix",
        lambda s: ppb.RetainPrefixRequest(
            pool_id="pool",
            token_ids=bytes(LARGE),
            time_to_live=duration_pb2.Duration(seconds=1),
            priority=1,
        ),
        None,
    ),
    "tokens to forget": (
        "ForgetPrefixes",
        lambda s: ppb.ForgetPrefixesRequest(
            pool_id="pool", scope=ppb.FORGET_SCOPE_PREFIX, token_ids=bytes(LARGE)
        ),
        None,
    ),
}
# An honest engine's wait is measured beside one request for each way that a plane reads it; at
# night beside all of them.
ON_PUSH = ("operations", "layers", "pools to search", "tokens to search")


@pytest.fixture
def session(channel: grpc.Channel, honest: HonestCaller) -> tpb.SessionRef:
    stub = stub_of(channel)
    request = pb.OpenSessionRequest(
        pool_id="pool",
        layout=tpb.Layout(fingerprint=LAYOUT.fingerprint),
    )
    return stub.OpenSession(request).session


Attack = Callable[[], None]
Unharmed = Callable[[Attack], None]


@pytest.fixture
def unharmed(control_plane: PlaneProcess, honest: HonestCaller) -> Unharmed:
    """Runs an attack, a few times where the machine is busy, which is to disturb the honest caller
    little and to take little memory.
    """

    def run(attack: Attack) -> None:
        def during_attack() -> list[float]:
            with honest.meanwhile(ATTACK_S) as during:
                attack()
            return during

        begin_bytes = control_plane.begin_peak()
        assert_calm(honest, during_attack)
        assert control_plane.peak_bytes() - begin_bytes < MAX_GROWTH_BYTES

    return run


def path_of(method: str) -> str:
    """Return "v1.SERVICE/METHOD"."""
    files = (pb.DESCRIPTOR, pool_pb2.DESCRIPTOR, ppb.DESCRIPTOR)
    services = {name: each for file in files for name, each in file.services_by_name.items()}
    (name,) = [name for name, each in services.items() if method in each.methods_by_name]
    return f"v1.{name}/{method}"


def data_of(request: object) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def send(channel: grpc.Channel, session: tpb.SessionRef, name: str) -> None:
    """Send a request, which has to be refused by the field's name, or answered."""
    method, request, field = (REFUSED | ANSWERED)[name]
    error = refusal(channel, path_of(method), data_of(request(session)))
    if field is None:
        assert error is None
    else:
        assert isinstance(error, InvalidRequestError)
        assert error.field == field


@pytest.mark.parametrize("name", REFUSED)
def test_more_than_there_may_be_is_refused(
    session: tpb.SessionRef, channel: grpc.Channel, name: str
) -> None:
    send(channel, session, name)


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_names_that_health_is_asked_for_take_little_memory(
    control_plane: PlaneProcess, channel: grpc.Channel, method: str
) -> None:
    begin_bytes = control_plane.begin_peak()
    ask = channel.stream_stream(f"/grpc.health.v1.Health/{method}")
    calls = [ask(iter([delimited(1, bytes(LARGE))]), timeout=PATIENCE_S) for _ in range(60)]
    codes = {call.code() for call in calls}  # 16 of a connection at one time are looked at
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert control_plane.peak_bytes() - begin_bytes < 12 * LARGE


@pytest.mark.parametrize(
    "method",
    [
        "health.v1.Health/Check",
        "health.v1.Health/Watch",
        "reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_names_in_methods_for_everybody_are_short(channel: grpc.Channel, method: str) -> None:
    request = delimited(1, b"a" * 8192)
    with pytest.raises(grpc.RpcError) as refused:
        next(channel.stream_stream(f"/grpc.{method}")(iter([request]), timeout=PATIENCE_S))
    assert isinstance(from_rpc_error(refused.value), InvalidRequestError)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ON_PUSH else [pytest.mark.nightly])
        for name in REFUSED | ANSWERED
    ],
)
def test_an_honest_engine_goes_on_beside_a_large_request(
    session: tpb.SessionRef, channel: grpc.Channel, unharmed: Unharmed, name: str
) -> None:
    unharmed(lambda: send(channel, session, name))


def register(channel: grpc.Channel, **fields: object) -> KvplaneError | None:
    """Return the error that a data plane of this Hello gets; None when it is welcomed."""
    requests = iter([rpb.RegisterRequest(hello=hello(**fields))])
    return refusal(channel, "plane.v1.RegistrationService/Register", requests)


@pytest.mark.parametrize("num_host_blocks", [0, 2**24])
def test_more_blocks_than_there_is_room_for_are_refused(
    channel: grpc.Channel, unharmed: Unharmed, num_host_blocks: int
) -> None:
    def attack() -> None:
        error = register(
            channel, pool_id="another", num_device_blocks=2**24, num_host_blocks=num_host_blocks
        )
        assert isinstance(error, QuotaExceededError)
        assert error.field == "hello.num_device_blocks"

    unharmed(attack)


def test_pools_are_not_made_without_end(channel: grpc.Channel, unharmed: Unharmed) -> None:
    assert register(channel, pool_id="first") is None

    def attack() -> None:
        errors = [register(channel, pool_id=f"pool {i}") for i in range(70)]
        assert isinstance(errors[-1], QuotaExceededError)
        assert errors[-1].field == "hello.pool_id"

    unharmed(attack)
