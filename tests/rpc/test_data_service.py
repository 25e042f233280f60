"""The data plane's RPCs over a real socket: streams, unary calls, errors, limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from data_plane.server.tensor_codec import tensor_to_message
from kvplane import Tensor
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    LayoutMismatchError,
    PlanOutOfOrderError,
    QuotaExceededError,
    SessionExpiredError,
    StaleEpochError,
)
from kvplane.release import release
from kvplane.wire.error_codec import from_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import types_pb2
from tests.helpers.data.plan_author import (
    HOST,
    blocks_of,
    dense_attention,
    fork,
    int32,
    int64,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.refusals import refused
from tests.helpers.served import Served, Stream, received, served


@pytest.fixture
async def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr("data_plane.server.server.MAX_MESSAGE_BYTES", 1 << 20)
    async with served(tmp_path) as peer:
        yield peer


def plan_of(peer: Served, num_tokens: int = 2) -> types_pb2.SignedPayload:
    """Return the first plan of session 1, in block 0."""
    changes = [set_blocks(1, [(0, 1)])]
    return peer.author.plan(1, changes=changes, spans=[span(1, 0, num_tokens)])


def layer_input(
    layer: int, num_tokens: int, *, plan_number: int = 1, **parts: torch.Tensor
) -> pb.RunLayerRequest:
    values = {
        "query": tokens(num_tokens, 4),
        "key": tokens(num_tokens, seed=1),
        "value": tokens(num_tokens, seed=2),
        **parts,
    }
    messages = {name: tensor_to_message(tensor) for name, tensor in values.items()}
    return pb.RunLayerRequest(layer=layer, plan_number=plan_number, **messages)


def without(layer: pb.RunLayerRequest, *names: str) -> pb.RunLayerRequest:
    for name in names:
        layer.ClearField(name)  # type: ignore[arg-type]
    return layer


async def test_its_server_info_says_what_runs_here(peer: Served) -> None:
    async with peer.client() as client:
        info = await client.get_server_info()
    assert (info.version, info.incarnation, info.device) == (release(), 1, "cpu")
    assert info.pool_id == peer.executor.pool_id
    assert info.shard is not None
    assert info.shard.shard == peer.executor.shard
    assert (info.shard.epoch, info.shard.address) == (peer.executor.epoch, peer.server.address)
    assert (info.shard.connected, info.shard.has_file_tier) == (True, False)


async def test_an_execution_runs_a_plan_and_ends_with_its_receipt(
    peer: Served, shared_memory: bool
) -> None:
    query, key, value = tokens(12, 4), tokens(12, seed=1), tokens(12, seed=2)
    async with (
        peer.client(shared_memory=shared_memory) as client,
        await client.open(peer.author.grant()) as execution,
    ):
        changes = [set_blocks(1, [(5, 1), (2, 1)])]
        await execution.start(peer.author.plan(1, changes=changes, spans=[span(1, 0, 12)]))
        assert execution.num_tokens == 12
        for layer in execution.layers:
            assert not execution.receipts
            output = await execution.layer(layer, *map(Tensor.from_array, (query, key, value)))
        want = dense_attention(query, key, value)
        torch.testing.assert_close(output.torch(), want, atol=1e-5, rtol=1e-5)
        assert peer.author.read_receipt(*execution.receipts).plan_number == 1


async def test_a_plan_shown_over_a_second_stream_goes_on_where_it_was(peer: Served) -> None:
    plan = plan_of(peer, 3)
    first = await peer.opened()
    assert (await first.ask(plan=plan)).started.num_tokens == 3
    assert (await first.ask(layer=layer_input(0, 3))).output.layer == 0
    first.call.cancel()
    second = await peer.opened()
    assert not (await second.ask(plan=plan)).started.finished
    output = (await second.ask(layer=layer_input(1, 3))).output
    assert output.layer == 1
    assert peer.author.read_receipt(output.receipt).plan_number == 1
    third = await peer.opened()
    started = (await third.ask(plan=plan)).started
    assert (started.finished, started.receipt) == (True, output.receipt)


HUGE = types_pb2.Tensor(dtype=types_pb2.ELEMENT_TYPE_FLOAT32, shape=[0, 2**62, 2**62])
# The field that is named, and what is done to the right message of a layer.
SPOILED: list[tuple[str, Callable[[pb.RunLayerRequest], object]]] = [
    ("layer.layer", lambda m: setattr(m, "layer", 7)),
    ("layer.grant", lambda m: m.grant.SetInParent()),
    ("layer.plan", lambda m: m.plan.SetInParent()),
    ("layer.layer", lambda m: without(m, "key", "value")),
    ("layer.key", lambda m: without(m, "query", "key", "value")),
    ("layer.key", lambda m: without(m, "key")),
    ("layer.value.data", lambda m: setattr(m.value, "data", m.value.data[:-1])),
    ("layer.key.shape", lambda m: m.key.shape.__setitem__(0, -2)),
    ("layer.key.shape", lambda m: m.key.CopyFrom(HUGE)),
    ("layer.key.memory", lambda m: setattr(m.key.memory, "region_id", 1)),
    ("layer.options", lambda m: m.options.MergeFromString(b"\x98\x06\x01")),  # a later field
    ("layer.query.dtype", lambda m: setattr(m.query, "dtype", 9)),
]


async def test_a_stream_answers_errors_and_stays_open(peer: Served) -> None:
    stream = Stream(peer.stub.Execute())
    before = peer.memory

    async def refused(error: type[Exception], field: str, **message: Any) -> None:
        answer = await stream.ask(**message)
        assert answer.WhichOneof("message") == "error", answer
        caught = from_wire(answer.error)
        assert (type(caught), caught.field) == (error, field)
        assert peer.memory == before
        peer.executor.check_integrity()

    grant = peer.author.grant()
    await refused(InvalidRequestError, "message")
    await refused(InvalidRequestError, "open", plan=peer.author.plan(1))
    await refused(InvalidRequestError, "layer", layer=layer_input(0, 1))
    forged = types_pb2.SignedPayload(type=grant.type, payload=grant.payload, signature=b"no")
    opening = pb.OpenExecution(grant=forged)
    await refused(BadSignatureError, "grant.signature", open=opening)
    opening = pb.OpenExecution(grant=grant)
    assert (await stream.ask(open=opening)).opened.layers == [0, 1]
    await refused(InvalidRequestError, "layer", layer=layer_input(0, 1))
    granted = pb.StartPlanRequest(grant=grant, plan=peer.author.plan(1))
    await refused(InvalidRequestError, "plan.grant", plan=granted)
    stale = peer.author.plan(1, shard_epochs=[4])
    await refused(StaleEpochError, "plan.shard_epochs[0]", plan=stale)
    await refused(PlanOutOfOrderError, "plan.previous", plan=peer.author.plan(2))
    assert (await stream.ask(plan=plan_of(peer))).started.num_tokens == 2
    for field, spoil in SPOILED:
        layer = layer_input(0, 2)
        spoil(layer)
        await refused(InvalidRequestError, field, layer=layer)
    assert (await stream.ask(layer=layer_input(0, 2))).output.layer == 0
    last = (await stream.ask(layer=layer_input(1, 2))).output
    assert peer.author.read_receipt(last.receipt).plan_number == 1


async def test_bytes_that_are_no_request_are_answered_on_the_stream(peer: Served) -> None:
    async with grpc.aio.insecure_channel(peer.server.address) as channel:
        call = channel.stream_stream("/kvplane.v1.ExecutionService/Execute")()
        await call.write(b"\xff\xff\xff")
        answer = pb.ExecuteResponse.FromString(await call.read())
        assert answer.error.reason == "INVALID_REQUEST"
        request = pb.ExecuteRequest(open=pb.OpenExecution(grant=peer.author.grant()))
        await call.write(request.SerializeToString())
        assert pb.ExecuteResponse.FromString(await call.read()).HasField("opened")
        call.cancel()


@pytest.mark.parametrize(
    ("method", "field"), [("ReshapeAndCache", "key"), ("PagedAttention", "query")]
)
async def test_half_a_layer_has_its_own_tensor(peer: Served, method: str, field: str) -> None:
    with refused(InvalidRequestError, field):
        await peer.ask(method, plan=plan_of(peer))
    assert peer.executor.num_sequences == 0, "the plan was not started"


UNARY = {
    "ReshapeAndCache": ("query", "options", "output"),
    "PagedAttention": ("key", "value"),
}


@pytest.mark.parametrize(("method", "field"), [(m, f) for m in UNARY for f in UNARY[m]])
async def test_half_a_layer_has_nothing_of_the_other_half(
    peer: Served, method: str, field: str
) -> None:
    fields: dict[str, Any] = {
        "query": tokens(2, 4),
        "key": tokens(2, seed=1),
        "value": tokens(2, seed=2),
        "options": pb.AttentionOptions(scale=0.5),
        "output": types_pb2.MemoryRange(offset_bytes=64),
    }
    for other in {*UNARY[method]} - {field}:
        del fields[other]
    before = peer.memory
    with refused(InvalidRequestError, field):
        await peer.ask(method, plan=plan_of(peer), **fields)
    assert (peer.memory, peer.executor.num_sequences) == (before, 0)


async def test_a_single_call_may_name_its_plan_and_its_pass(peer: Served) -> None:
    plan = plan_of(peer)
    started = await peer.ask("CopyBlocks", plan=plan, pass_index=0)
    assert (started.plan_number, started.num_tokens, started.finished) == (1, 1, False)
    parts = {"plan": plan, "key": tokens(1, seed=1), "value": tokens(1, seed=2)}
    for named, field in (
        ({"plan_number": 2}, "plan_number"),
        ({"plan_number": 1}, "pass_index"),
        ({"pass_index": 1}, "pass_index"),
    ):
        with refused(PlanOutOfOrderError, field):
            await peer.ask("ReshapeAndCache", **parts, **named)
    for named in ({"pass_index": 0}, {"plan_number": 1, "pass_index": 0}):
        assert (await peer.ask("ReshapeAndCache", **parts, **named)).layer == 0


async def test_a_plan_can_be_run_by_unary_calls_alone(peer: Served) -> None:
    query, key, value = tokens(9, 4), tokens(9, seed=1), tokens(9, seed=2)
    changes = [set_blocks(1, [(3, 1), (1, 1)])]
    plan = peer.author.plan(1, changes=changes, spans=[span(1, 0, 9)])

    async def write(layer: int, key: torch.Tensor, value: torch.Tensor) -> Any:
        return await peer.ask("ReshapeAndCache", plan=plan, layer=layer, key=key, value=value)

    async def attend(layer: int) -> Any:
        return await peer.ask("PagedAttention", plan=plan, layer=layer, query=query)

    for _ in range(2):
        assert not (await write(0, key, value)).HasField("receipt")
    with refused(InvalidRequestError, "layer"):
        await attend(1)
    attended = await attend(0)
    want = dense_attention(query, key, value)
    torch.testing.assert_close(received(attended.output), want, atol=1e-5, rtol=1e-5)
    response = await write(1, key, value)
    assert peer.author.read_receipt(response.receipt).plan_number == 1
    assert (await write(1, value, key)).receipt == response.receipt
    late = await attend(0)
    assert (late.output, late.receipt) == (attended.output, response.receipt)


async def test_copies_and_swaps_are_calls_of_their_own(peer: Served) -> None:
    author = peer.author
    await peer.ask("CopyBlocks", plan=author.plan(1, changes=[set_blocks(1, [(0, 1)])]))
    blocks = torch.randn(2, 1, 2, 2, 8, 16)
    written = await peer.ask(
        "WriteBlocks",
        plan=author.plan(2, spans=[span(1, 0, 8)]),
        sequence_ids=int64(1),
        entries=int32(0),
        blocks=blocks,
    )
    assert author.read_receipt(written.receipt).plan_number == 2
    copy = author.plan(
        3,
        changes=[fork(2, 1, 0), set_blocks(2, [(4, 1)])],
        transfers=[transfer(ref(0), ref(4))],
    )
    with refused(InvalidRequestError, "plan.transfers.destination_tiers[0]"):
        await peer.ask("SwapBlocks", plan=copy)
    copied = await peer.ask("CopyBlocks", plan=copy)
    assert (copied.num_copied_blocks, copied.num_swapped_blocks) == (1, 0)
    assert author.read_receipt(copied.receipt).plan_number == 3
    swap = author.plan(
        4,
        changes=[set_blocks(2, [(1, 1)], tier=HOST, replace=True)],
        transfers=[transfer(ref(4), ref(1, 1, HOST))],
    )
    swapped = await peer.ask("SwapBlocks", plan=swap)
    assert (swapped.num_copied_blocks, swapped.num_swapped_blocks) == (0, 1)
    read = await peer.ask("ReadBlocks", sequence_id=2, entries=int32(0))
    assert torch.equal(received(read.blocks), blocks)
    assert (read.table.tier, blocks_of(read.table)) == (HOST, [(1, 1)])
    assert read.layout_fingerprint == peer.executor.layout.fingerprint


async def filled(peer: Served) -> torch.Tensor:
    """Fill two blocks of sequence 1; return them as they are read."""
    changes = [set_blocks(1, [(0, 1), (1, 1)])]
    fill = peer.author.plan(1, changes=changes, spans=[span(1, 0, 16)])
    blocks = torch.randn(2, 2, 2, 2, 8, 16)
    ids, entries = int64(1, 1), int32(0, 1)
    written = await peer.ask(
        "WriteBlocks", plan=fill, sequence_ids=ids, entries=entries, blocks=blocks
    )
    assert written.HasField("receipt")
    return blocks


def second_write(peer: Served) -> dict[str, Any]:
    """Return the fields of a write of two blocks to sequence 2."""
    changes = [set_blocks(2, [(4, 1), (5, 1)])]
    plan = peer.author.plan(2, changes=changes, spans=[span(2, 0, 16)])
    return {"plan": plan, "sequence_ids": int64(2, 2), "entries": int32(0, 1)}


async def test_blocks_travel_in_parts_of_layers_and_say_where_from(peer: Served) -> None:
    blocks, write = await filled(peer), second_write(peer)
    for layer in (0, 1):
        layers = {"first_layer": layer, "num_layers": 1}
        part = await peer.ask("ReadBlocks", sequence_id=1, entries=int32(0, 1), **layers)
        sent = {**write, **layers, "blocks": part.blocks}
        with refused(LayoutMismatchError, "layout_fingerprint"):
            await peer.ask("WriteBlocks", **sent, layout_fingerprint=bytes(32))
        fingerprint = part.layout_fingerprint
        written = await peer.ask("WriteBlocks", **sent, layout_fingerprint=fingerprint)
        assert written.HasField("receipt") == (layer == 1)
    copied = await peer.ask("ReadBlocks", sequence_id=2, entries=int32(0, 1))
    assert torch.equal(received(copied.blocks), blocks)


PAYLOAD = types_pb2.SignedPayload(type="kvplane.plane.v1.PinGrant")
NOT_SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "entries": ("ReadBlocks", {"entries": b""}),
    "entries[1]": ("ReadBlocks", {"entries": int32(0, 2)}),
    "group": ("ReadBlocks", {"group": 3}),
    "sequence_id": ("ReadBlocks", {"pin_grant": PAYLOAD}),
    "output": ("ReadBlocks", {"output": types_pb2.MemoryRange()}),
    "keys": ("ReadBlocks", {"keys": [b"key"]}),
    "entries of a write": ("WriteBlocks", {"entries": b"", "sequence_ids": b""}),
    "entries[1] of a write, twice": ("WriteBlocks", {"entries": int32(1, 1)}),
    "sequence_ids": ("WriteBlocks", {"sequence_ids": int64(2)}),
    "sequence_ids[2]": (
        "WriteBlocks",
        {"sequence_ids": int64(2, 1, 2), "entries": int32(0, 0, 1)},
    ),
    "blocks.shape": ("WriteBlocks", {"entries": int32(0), "sequence_ids": int64(2)}),
    "num_bytes": ("WriteBlocks", {"num_bytes": int32(4, 4)}),
    "keys of a write": ("WriteBlocks", {"keys": [b"key"]}),
}


@pytest.mark.parametrize("name", NOT_SERVED)
async def test_blocks_that_are_not_served_are_refused_by_name(peer: Served, name: str) -> None:
    method, changed = NOT_SERVED[name]
    blocks = await filled(peer)
    fields: dict[str, Any] = {"sequence_id": 1, "entries": int32(0, 1)}
    if method == "WriteBlocks":
        fields = {**second_write(peer), "blocks": blocks}
    before, num_sequences = peer.memory, peer.executor.num_sequences
    with refused(InvalidRequestError, name.partition(" ")[0]):
        await peer.ask(method, **{**fields, **changed})
    assert (peer.memory, peer.executor.num_sequences) == (before, num_sequences)


async def test_unary_calls_fail_with_the_error_and_its_field(peer: Served) -> None:
    forged = types_pb2.SignedPayload(type=peer.author.grant().type)
    with pytest.raises(BadSignatureError):
        await peer.ask("ReadBlocks", grant=forged, sequence_id=1, entries=int32(0))
    peer.executor.fence(peer.author.session(1), 1)
    with refused(SessionExpiredError, "grant.session"):
        await peer.ask("ReadBlocks", sequence_id=1, entries=int32(0))


async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(peer: Served) -> None:
    with pytest.raises(QuotaExceededError):
        await peer.ask("ReshapeAndCache", key=types_pb2.Tensor(data=bytes(2 << 20)))
    async with peer.client() as client:
        assert (await client.get_server_info()).shard.epoch == peer.executor.epoch


async def test_stopping_ends_idle_streams_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, grace_s=30.0) as peer:
        stream = await peer.opened()
        await peer.server.stop()
        assert await stream.call.code() == grpc.StatusCode.UNAVAILABLE
