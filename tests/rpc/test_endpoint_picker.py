"""The endpoint picker over gRPC, as a gateway's external processing speaks to it."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import httpx2
import pytest

from kvplane.clients.prefix_feed import BlocksStored, StoredBlock
from kvplane.router import endpoint_picker
from kvplane.router.endpoint_picker import DESTINATION, SERVICE, EndpointPicker
from kvplane.router.engines import Engines
from kvplane.router.ext_proc.v3 import ext_proc_pb2 as pb
from kvplane.router.metrics import RouterMetrics
from kvplane.router.picker import Picker
from kvplane.router.pool_index import PoolIndex
from kvplane.router.prompts import PromptReader
from kvplane.serving import server as serving

COLD, WARM = "10.0.0.1:8000", "10.0.0.2:8000"
PROMPT = list(range(1, 10))
BUFFERED, DUPLEX = 2, 4
PATIENCE_S = 60.0


class Gateway:
    """A picker before two engines, the second of which has the prompt cached; and its caller."""

    def __init__(self) -> None:
        pools = {f"http://{COLD}": "cold", f"http://{WARM}": "warm"}
        self.picker = Picker(pools)
        self.picker.indexes["warm"] = index = PoolIndex(4)
        index.apply(BlocksStored((StoredBlock(b"a" * 16, bytes(16), array("i", PROMPT[:4]), 1),)))
        self.client = httpx2.AsyncClient()
        self.engines = Engines(self.client, pools, 3600.0, "")
        self.engines._models = {url: [{"id": "m"}] for url in pools}
        self.metrics, self.reader = RouterMetrics([]), PromptReader(None)
        self.server = serving.build("127.0.0.1:0", max_message_bytes=1 << 20)
        EndpointPicker(
            self.engines,
            self.picker,
            self.reader,
            self.metrics,
            max_requests=2,
            max_body_bytes=200_000,
        ).add_to(self.server.grpc_server)

    async def start(self) -> None:
        await self.server.start([SERVICE], serving=True)
        self.channel = grpc.aio.insecure_channel(self.server.address)
        self.process = self.channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.client.aclose()
        self.reader.close()

    async def ask(self, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """What all messages together are answered with."""
        async with asyncio.timeout(PATIENCE_S):
            return [response async for response in self.process(iter(messages))]

    @property
    def num_open(self) -> int:
        return sum(load.num_open for load in self.picker.loads.values())


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    await made.start()
    yield made
    await made.stop()


def headers(mode: int = BUFFERED, *, answer_mode: int = 0, **how: Any) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest(
        protocol_config=pb.ProtocolConfiguration(
            request_body_mode=mode, response_body_mode=answer_mode
        )
    )
    sent = message.request_headers
    sent.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    sent.end_of_stream = how.get("end_of_stream", False)
    return message


def body(data: bytes | dict[str, Any], *, is_last: bool = True) -> pb.ProcessingRequest:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=raw, end_of_stream=is_last))


def request(**how: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": PROMPT} | how


def endpoint(response: pb.ProcessingResponse) -> str:
    """Where a response sends the request; header and metadata say the same."""
    common = getattr(response, response.WhichOneof("response")).response
    (option,) = common.header_mutation.set_headers
    assert (option.header.key, option.append_action) == (DESTINATION, 2)
    assert common.clear_route_cache
    found = str(option.header.raw_value.decode())
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == found
    return found


def kinds(responses: Sequence[pb.ProcessingResponse]) -> list[str]:
    return [str(response.WhichOneof("response")) for response in responses]


async def test_a_whole_body_is_answered_with_the_engine_that_has_its_prompt(
    gateway: Gateway,
) -> None:
    for _ in range(3):
        responses = await gateway.ask(headers(), body(request()))
        assert kinds(responses) == ["request_headers", "request_body"]
        assert not responses[0].request_headers.response.header_mutation.set_headers
        assert endpoint(responses[1]) == WARM
    assert gateway.num_open == 0


async def test_a_body_in_parts_is_sent_back_after_the_headers(gateway: Gateway) -> None:
    raw = json.dumps(request(user="x" * 150_000)).encode()
    parts = [raw[:70_000], raw[70_000:140_000], raw[140_000:]]
    sent = [body(part, is_last=part is parts[-1]) for part in parts]
    responses = await gateway.ask(headers(DUPLEX), *sent)
    assert kinds(responses) == ["request_headers", *["request_body"] * 3]
    assert endpoint(responses[0]) == WARM
    back = [r.request_body.response.body_mutation.streamed_response for r in responses[1:]]
    assert b"".join(part.body for part in back) == raw
    assert [part.end_of_stream for part in back] == [False, False, True]
    assert max(len(part.body) for part in back) < 1 << 16


async def test_trailers_end_a_body_too(gateway: Gateway) -> None:
    trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    responses = await gateway.ask(headers(DUPLEX), body(request(), is_last=False), trailers)
    assert kinds(responses) == ["request_headers", "request_body", "request_trailers"]
    assert endpoint(responses[0]) == WARM
    assert not responses[1].request_body.response.body_mutation.streamed_response.end_of_stream


async def test_a_request_counts_once_though_its_body_ends_twice(gateway: Gateway) -> None:
    responses = await gateway.ask(headers(), body(request()), body(b""))
    assert [endpoint(response) for response in responses[1:]] == [WARM, WARM]
    assert gateway.num_open == 0


async def test_a_request_without_a_body_goes_anywhere(gateway: Gateway) -> None:
    (response,) = await gateway.ask(headers(end_of_stream=True))
    assert endpoint(response) in (COLD, WARM)


@pytest.mark.parametrize("subset", [[COLD, "10.9.9.9:1"], f"{COLD}, 10.9.9.9:1"])
async def test_only_what_the_gateway_allows_is_picked(gateway: Gateway, subset: Any) -> None:
    first = headers()
    hint = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint.update({"x-gateway-destination-endpoint-subset": subset})
    responses = await gateway.ask(first, body(request()))
    assert endpoint(responses[1]) == COLD
    hint.update({"x-gateway-destination-endpoint-subset": []})
    refused = (await gateway.ask(first, body(request())))[-1].immediate_response
    assert refused.status.code == 503


async def test_the_answer_tells_how_busy_the_engine_is(gateway: Gateway) -> None:
    load = gateway.picker.loads[f"http://{WARM}"]
    call = gateway.process()
    async with asyncio.timeout(PATIENCE_S):
        await call.write(headers(answer_mode=DUPLEX))
        await call.read()
        await call.write(body(request(stream=True)))
        assert endpoint(await call.read()) == WARM
        assert (load.num_open, load._num_waiting_tokens) == (1, 5)
        await call.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
        assert kinds([await call.read()]) == ["response_headers"]
        assert load._num_waiting_tokens == 5  # headers alone are not the first token
        part = pb.HttpBody(body=b"data: 1\n\n")
        await call.write(pb.ProcessingRequest(response_body=part))
        back = (await call.read()).response_body.response.body_mutation.streamed_response
        assert (back.body, back.end_of_stream) == (part.body, False)
        assert (load.num_open, load._num_waiting_tokens) == (1, 0)
        call.cancel()
        while load.num_open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        (b"{", 400, "body"),
        (b" " * 200_001, 400, "body"),
        (json.dumps(request(model="other")).encode(), 404, "model"),
    ],
)
async def test_what_cannot_be_routed_is_answered_at_once(
    gateway: Gateway, data: bytes, status: int, param: str
) -> None:
    refused = (await gateway.ask(headers(), body(data)))[-1].immediate_response
    assert (refused.status.code, json.loads(refused.body)["error"]["param"]) == (status, param)
    names = [option.header.key for option in refused.headers.set_headers]
    assert names == ["content-type"]


async def test_without_engines_or_with_another_mode_a_request_is_refused(gateway: Gateway) -> None:
    (refused,) = await gateway.ask(headers(1))
    assert refused.immediate_response.status.code == 400
    for url in [*gateway.engines.up]:
        gateway.engines.failed(url)
    refused = (await gateway.ask(headers(), body(request())))[-1]
    assert refused.immediate_response.status.code == 503


async def test_no_more_requests_are_open_than_allowed(gateway: Gateway) -> None:
    calls = [gateway.process() for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        for call in calls:
            await call.write(headers())
            await call.read()
        (refused,) = await gateway.ask(headers())
        assert refused.immediate_response.status.code == 429
        for call in calls:
            call.cancel()


async def test_a_request_that_does_not_come_gives_its_place_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_picker, "BODY_S", 3.0)  # for a busy machine, too
    calls = [gateway.process() for _ in range(2)]
    for call in calls:
        await call.write(headers())
        assert (await call.read()).HasField("request_headers")
    refused = (await gateway.ask(headers()))[0]
    assert refused.immediate_response.status.code == 429
    for call in calls:
        async with asyncio.timeout(PATIENCE_S):
            told = await call.read()
        assert told.immediate_response.status.code == 400
        assert b"did not come within" in told.immediate_response.body
    responses = await gateway.ask(headers(), body(request()))
    assert endpoint(responses[1]) == WARM
