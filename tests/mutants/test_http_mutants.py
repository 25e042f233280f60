"""Each planted fault of the HTTP servers' bounds is caught by the attack that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvplane.integrations.router import app, engines, program, prompts, proxy
from kvplane.serving import http_requests
from kvplane.serving.limits import open_requests
from kvplane.serving.limits.receive_budget import Received
from tests.helpers.patched_faults import NOTICES, load

CLIENTS = load("attacks/test_http_clients.py")
ENGINES = load("attacks/test_http_engines.py")
TIMEOUT_S = 9.0  # of attacks that take a fraction of it; some faults show as waiting for ever
Patch = pytest.MonkeyPatch


def configured(patch: Patch, **settings: Any) -> None:
    original = uvicorn.Config
    patch.setattr(uvicorn, "Config", lambda app, **given: original(app, **(given | settings)))


def idle_connections_stay(patch: Patch) -> None:
    configured(patch, timeout_keep_alive=3600)


def heads_have_any_length(patch: Patch) -> None:
    configured(patch, h11_max_incomplete_event_size=1 << 40)


def bodies_are_waited_for(patch: Patch) -> None:
    patch.setattr(http_requests, "BODY_S", 3600.0)


def any_number_of_connections_is_open(patch: Patch) -> None:
    configured(patch, limit_concurrency=None)


def one_key_has_all(patch: Patch) -> None:
    patch.setattr(open_requests, "share_of_one", lambda most, num_clients: most)


def bodies_are_not_counted(patch: Patch) -> None:
    patch.setattr(Received, "take", lambda self, num_bytes: None)


def bodies_count_for_ever(patch: Patch) -> None:
    patch.setattr(Received, "close", lambda self: None)


def texts_wait_in_any_number(patch: Patch) -> None:
    async def in_thread(self: Any, encode: Any, what: Any, num_characters: int) -> Any:
        return await asyncio.wrap_future(self._thread.submit(encode, what)), 0

    patch.setattr(prompts.PromptReader, "_in_thread", in_thread)


def cookies_are_kept(patch: Patch) -> None:
    patch.setattr(program, "DefaultCookiePolicy", lambda **_: DefaultCookiePolicy())


def all_engines_are_tried(patch: Patch) -> None:
    patch.setattr(proxy, "_MOST_BROKEN", 100)


def lists_are_read_to_their_end(patch: Patch) -> None:
    patch.setattr(engines, "_MAX_BYTES", 1 << 40)


def lists_have_any_number(patch: Patch) -> None:
    patch.setattr(engines, "_MAX_MODELS", 1 << 40)


LARGE = ((b" " * (1 << 20),) * 64, 0.0, True)
MANY = ((b'{"data":[' + b"{}," * 5000 + b"{}]}",), 0.0, True)
CAUGHT_BY: dict[Callable[[Patch], None], tuple[Any, tuple[Any, ...]]] = {
    idle_connections_stay: (CLIENTS.test_an_idle_connection_is_closed_after_an_answer, ()),
    heads_have_any_length: (CLIENTS.test_a_head_without_end_is_refused, ()),
    bodies_are_waited_for: (CLIENTS.test_a_body_that_does_not_come_gives_its_place_up, ()),
    any_number_of_connections_is_open: (CLIENTS.test_connections_are_bounded, (Patch,)),
    one_key_has_all: (CLIENTS.test_one_key_cannot_have_all_places, ()),
    bodies_are_not_counted: (CLIENTS.test_bodies_take_no_more_memory_than_is_set, ()),
    bodies_count_for_ever: (CLIENTS.test_bodies_take_no_more_memory_than_is_set, ()),
    texts_wait_in_any_number: (
        CLIENTS.test_long_texts_do_not_keep_others_from_the_tokenizer,
        (Path,),
    ),
    cookies_are_kept: (ENGINES.test_a_cookie_of_one_client_is_not_shown_for_another, ()),
    all_engines_are_tried: (
        ENGINES.test_a_request_that_breaks_engines_comes_to_two_and_no_more,
        (),
    ),
    lists_are_read_to_their_end: (
        ENGINES.test_a_list_of_models_is_read_in_time_and_in_bounds,
        (*LARGE, Patch),
    ),
    lists_have_any_number: (
        ENGINES.test_a_list_of_models_is_read_in_time_and_in_bounds,
        (*MANY, Patch),
    ),
}


@pytest.mark.parametrize("fault", CAUGHT_BY, ids=lambda fault: fault.__name__)
async def test_an_attack_catches(
    fault: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    CLIENTS.shorten(monkeypatch)
    fault(monkeypatch)
    if fault is one_key_has_all:
        monkeypatch.setattr(app, "share_of_one", open_requests.share_of_one)
    test, arguments = CAUGHT_BY[fault]
    fixtures: dict[Any, Any] = {Path: tmp_path, Patch: monkeypatch}
    with pytest.raises((*NOTICES, ConnectionError)):
        async with asyncio.timeout(TIMEOUT_S):
            await test(*(fixtures.get(each, each) for each in arguments))
