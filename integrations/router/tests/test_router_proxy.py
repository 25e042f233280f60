"""Tests the router's proxy before failing engines: small servers that answer by script; and what
else the router is made of.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplane.clients.control_client import ControlClient
from kvplane.integrations.router.feeds import PoolFeeds
from kvplane.integrations.router.program import run
from tests.helpers.routed import (
    BODY,
    STREAM,
    Engine,
    Script,
    chunk,
    is_full,
    routed,
    says_yes,
)
from tests.helpers.waiting import until


async def dies(engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)  # headers alone are no answer yet
    await writer.drain()
    writer.transport.abort()


async def dies_in_its_stream(
    engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(STREAM + chunk(b"data: 1\n\n"))
    await writer.drain()
    await engine.go_on.wait()
    writer.transport.abort()


async def says_no_more(
    engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(STREAM + chunk(b"data: 1\n\n"))
    await writer.drain()
    await reader.read(1)
    engine.gone.set()


async def says_nothing(
    engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read(1)
    engine.gone.set()


async def test_a_request_and_its_answer_pass_as_they_are() -> None:
    engine = Engine(says_yes)
    async with routed(engine) as router:
        headers = {"x-request-id": "42", "connection": "x-mine", "x-mine": "1"}
        answer = await router.post(headers=headers | {"authorization": "Bearer mine"})
        assert (answer.status_code, answer.json()) == (200, {"yes": 1})
        assert answer.headers["x-engine"] == "kept"
        assert answer.headers["x-kvplane-pool"] == "pool-0"
        assert len(answer.headers.get_list("date")) == 1
        assert "keep-alive" not in answer.headers
    ((path, sent, body),) = engine.requests
    assert (path, json.loads(body)) == ("/v1/completions", BODY)
    assert (sent["x-request-id"], sent["authorization"]) == ("42", "Bearer mine")
    assert "x-mine" not in sent


@pytest.mark.parametrize("script", [is_full, dies])
async def test_another_engine_answers_when_one_fails_before_the_first_byte(script: Script) -> None:
    bad, good = Engine(script), Engine(says_yes)
    async with routed(bad, good) as router:
        answer = await router.post(BODY | {"stream": True})
        assert (answer.status_code, answer.headers["x-kvplane-pool"]) == (200, "pool-1")
        assert [len(bad.requests), len(good.requests)] == [1, 1]
        assert await router.metric("kvplane_router_retried_requests_total") == 1
        assert [load.num_open for load in router.picker.loads.values()] == [0, 1]


async def test_nothing_is_tried_again_after_the_first_byte() -> None:
    bad, good = Engine(dies_in_its_stream), Engine(says_yes)
    async with (
        routed(bad, good) as router,
        router.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == "data: 1"
        bad.go_on.set()
        rest = [line async for line in lines if line]
        assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "plane_unavailable"
        assert good.requests == []


async def test_an_engine_that_cannot_be_reached_is_left_alone() -> None:
    gone, good = Engine(says_yes), Engine(says_yes)
    async with routed(gone, good) as router:
        router.picker.loads["http://127.0.0.1:9"] = router.picker.loads.pop(gone.url)
        router.picker.loads["http://127.0.0.1:9"].num_open = -9
        router.picker.pool_of["http://127.0.0.1:9"] = "nowhere"
        router.picker._last_turn["http://127.0.0.1:9"] = -1
        router.engines._models["http://127.0.0.1:9"] = None
        for _ in range(3):
            assert (await router.post()).headers["x-kvplane-pool"] == "pool-1"
        assert "http://127.0.0.1:9" not in router.engines.up
        assert await router.metric("kvplane_router_retried_requests_total") == 1


async def test_the_last_engine_s_answer_is_given_when_all_fail() -> None:
    async with routed(Engine(is_full), Engine(is_full)) as router:
        answer = await router.post()
        assert (answer.status_code, answer.json()) == (503, {"full": 1})
        for url in [*router.engines.up]:
            router.engines.failed(url)
        answer = await router.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await router.http.get("/health")).status_code == 503
        assert (await router.http.get("/healthz")).status_code == 200


async def test_an_engine_whose_planes_are_away_is_asked_if_there_is_no_other() -> None:
    away, good = Engine(says_yes, health="503 Service Unavailable"), Engine(says_yes)
    async with routed(away, good) as router:
        for _ in range(3):
            assert (await router.post()).headers["x-kvplane-pool"] == "pool-1"
        router.engines.failed(good.url)
        assert (await router.post()).headers["x-kvplane-pool"] == "pool-0"


@pytest.mark.parametrize("script", [says_nothing, says_no_more])
async def test_who_goes_away_takes_the_request_along(script: Script) -> None:
    engine = Engine(script)
    async with routed(engine) as router:

        async def ask() -> None:
            body = BODY | {"stream": script is says_no_more}
            async with router.http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    asking.cancel()

        asking = asyncio.create_task(ask())
        if script is says_nothing:
            await until(lambda: len(engine.requests) == 1)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(60.0):
            await engine.gone.wait()
        await router.until_metric('kvplane_router_requests_total{status="499"}', 1)
        assert await router.metric("kvplane_router_open_requests") == 0
        assert router.picker.loads[engine.url].num_open == 0


@pytest.mark.parametrize("script", [says_nothing, says_no_more])
async def test_what_the_routers_end_cuts_counts_as_its_own(script: Script) -> None:
    engine = Engine(script)
    async with routed(engine, grace_s=0.1) as router:
        body = BODY | {"stream": script is says_no_more}
        asking = asyncio.create_task(router.post(body))
        await until(lambda: len(engine.requests) == 1)
        await asyncio.sleep(0.5)  # so that its answer has begun
        router.server.should_exit = True
        assert (await asking).status_code == (200 if script is says_no_more else 503)
        num = router.metrics.registry.get_sample_value
        assert num("kvplane_router_requests_total", {"status": "503"}) == 1
        assert num("kvplane_router_requests_total", {"status": "200"}) is None


async def test_an_engine_that_hangs_is_not_waited_for_for_ever() -> None:
    async with routed(Engine(says_nothing), Engine(says_yes), read_timeout_s=0.5) as router:
        answer = await router.post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_what_cannot_be_routed_is_refused() -> None:
    engine = Engine(says_yes)
    async with routed(engine, api_keys=("right",), engine_key="inner") as router:
        right = {"authorization": "Bearer right"}
        assert (await router.post()).status_code == 401
        assert (await router.http.get("/v1/models")).status_code == 401
        long = await router.post({"model": "m", "prompt": "x" * 5000}, headers=right)
        assert (long.status_code, long.json()["error"]["param"]) == (400, "body")
        for raw in (b"{", b"[]", b"[" * 4000, b"\xff"):
            answer = await router.http.post("/v1/completions", content=raw, headers=right)
            assert answer.status_code == 400
        other = await router.post(BODY | {"model": "other"}, headers=right)
        assert other.status_code == 404
        assert engine.requests == []
        assert (await router.post(headers=right)).status_code == 200
        assert engine.requests[0][1]["authorization"] == "Bearer inner"
        for method, path, status in (
            ("POST", "/v1/embeddings", 404),
            ("POST", "/v1/../metrics", 405),
            ("GET", "/v1/completions", 405),
        ):
            unknown = await router.http.request(method, path, headers=right)
            assert unknown.status_code == status
            assert " is not served" in unknown.json()["error"]["message"]


async def test_no_more_requests_are_open_than_allowed() -> None:
    engine = Engine(says_nothing)
    async with routed(engine, max_requests=2) as router:
        waiting = [asyncio.create_task(router.post()) for _ in range(2)]

        await until(lambda: len(engine.requests) == 2)
        answer = await router.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_models_are_those_of_all_engines_and_decide_who_is_asked() -> None:
    one, two, also = Engine(says_yes, "a"), Engine(says_yes, "b"), Engine(says_yes, "b")
    async with routed(one, two, also) as router:
        models = (await router.http.get("/v1/models")).json()["data"]
        assert sorted(model["id"] for model in models) == ["a", "b"]
        assert (await router.http.get("/v1/models/b")).json()["id"] == "b"
        assert (await router.http.get("/v1/models/c")).status_code == 404
        for _ in range(3):
            assert (await router.post(BODY | {"model": "a"})).status_code == 200
            assert (await router.post(BODY | {"model": "b"})).status_code == 200
    assert [len(one.requests), len(two.requests) + len(also.requests)] == [3, 3]


async def test_each_pool_has_one_feed_until_all_are_stopped() -> None:
    async with ControlClient("127.0.0.1:1") as nobody:
        feeds = PoolFeeds(nobody, "", {}, set())
        feeds.follow(["one", "two", "two"])
        assert feeds.caught_up == {"one": False, "two": False}
        await feeds.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_help_says_how_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"], {})
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Usage: kvplane router ")
    assert "KVPLANE_ROUTER_ENGINE" in printed


def test_numbers_stay_in_the_process(tmp_path: Path) -> None:
    made = (
        "from engine.serving.metrics import ServingMetrics\n"
        "from kvplane.integrations.router.metrics import RouterMetrics\n"
        "print(ServingMetrics(lambda: 3).text().decode(), RouterMetrics().text().decode())\n"
    )
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", made]
    shown = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert "kvplane_engine_open_requests 3.0" in shown
    assert [*tmp_path.iterdir()] == []
