"""``python -m engine serve``, as OpenAI's own client sees it."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from engine_planes import Process, save_byte_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.http_programs import HttpProgram
from tests.helpers.waiting import wait_until

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MAX_REQUESTS = 6
HEADERS = {"Authorization": "Bearer first-key"}
LONG = "a prompt of more than two blocks of sixteen tokens"


class Server(HttpProgram):
    def __init__(self, folder: Path) -> None:
        self.model = save_byte_model(folder / "byte-model")
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(self.model)
        self.control = Process("control_plane", folder / "control.log").start()
        keys = folder / "keys"
        keys.write_text("first-key\nsecond-key\n")
        super().__init__(
            *(folder, "engine", "engine", "serve", "--model", str(self.model)),
            *("--control-plane", self.control.address, "--data-plane", "embedded"),
            *("--num-device-blocks", "32", "--num-host-blocks", "0", "--num-threads", "1"),
            *("--max-requests", str(MAX_REQUESTS), "--max-body-bytes", "65536"),
            *("--api-keys-file", str(keys), "--grace-s", "0.1"),
            headers=HEADERS,
        )
        self.start()
        self.wait()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="second-key", max_retries=0)

    def complete(self, prompt: Any, **how: Any) -> Any:
        how = {"max_tokens": 8, "temperature": 0} | how
        return self.client.completions.create(model="byte-model", prompt=prompt, **how)

    def chat(self, content: str, **how: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        how = {"max_tokens": 8, "temperature": 0} | how
        return self.client.chat.completions.create(model="byte-model", messages=messages, **how)

    def stop(self) -> int:
        """It ends when it is told to, also while it answers; then it says so in the stream."""
        stream = self.complete("go on", max_tokens=400, stream=True, n=8)
        try:
            next(iter(stream))
            code = super().stop()
            with pytest.raises(openai.APIError, match="the server is stopping"):
                list(stream)
            assert code == 128 + signal.SIGTERM
            assert "Traceback" not in self.log.read_text()
            return code
        finally:
            stream.close()
            self.client.close()
            self.control.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("serve"))
    yield running
    running.stop()


def test_a_beam_search_gives_its_best_texts(server: Server) -> None:
    """They are compared with transformers' in tests/unit/engine/test_beam_search.py."""
    how = {"num_beams": 3, "ignore_eos": True}
    answer = server.complete(LONG, max_tokens=6, n=2, extra_body=how)
    assert len({choice.text for choice in answer.choices}) == 2
    assert answer.usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.complete(LONG, temperature=1, extra_body={"num_beams": 3})


def reference(server: Server, text: str, num_tokens: int) -> tuple[str, torch.Tensor]:
    """Return the tokens by which transformers continues ``text``, and the logits of each."""
    model = AutoModelForCausalLM.from_pretrained(server.model)
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), torch.cat(output.logits)


def test_a_completion_is_what_transformers_generates(server: Server) -> None:
    prompt = LONG[::-1]  # which no other test has
    want, logits = reference(server, prompt, 8)
    for num_cached in (0, 48):
        answer = server.complete(prompt, logprobs=3)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (want, "length")
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == 8
        assert answer.usage.prompt_tokens_details.cached_tokens == num_cached
        logprobs = torch.log_softmax(logits, -1)
        likeliest = torch.tensor(choice.logprobs.token_logprobs)
        torch.testing.assert_close(likeliest, logprobs.amax(-1), atol=1e-4, rtol=0)
        # Tokens that are no whole character have the same text.
        assert {1, 3} <= {len(top) for top in choice.logprobs.top_logprobs} | {1} <= {1, 2, 3}


def test_a_stream_gives_the_same_in_pieces(server: Server) -> None:
    prompts, how = ["the first", "the second"], {"n": 2, "temperature": 0.9, "seed": 5}
    whole = server.complete(prompts, **how)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3]
    assert len(set(texts.values())) == 4
    pieces = dict.fromkeys(texts, "")
    reasons: dict[int, str] = {}
    for chunk in server.complete(
        prompts, stream=True, stream_options={"include_usage": True}, **how
    ):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert pieces == texts
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_token_ids_are_a_prompt_too(server: Server) -> None:
    text = server.complete("abc").choices[0].text
    ids = [byte + 3 for byte in b"abc"]
    assert server.complete(ids).choices[0].text == text
    assert [choice.text for choice in server.complete([ids, ids]).choices] == [text, text]


def test_a_chat_is_a_completion_of_its_template(server: Server) -> None:
    want = server.complete("user: hello\nassistant:").choices[0].text
    answer = server.chat("hello", logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want)
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 8
    streamed = [c.choices[0].delta for c in server.chat("hello", stream=True)]
    assert streamed[0].role == "assistant"
    assert "".join(delta.content or "" for delta in streamed) == want
    parts: Any = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert server.chat(parts).choices[0].message.content == want
    long = server.chat("hello", max_tokens=None, extra_body={"ignore_eos": True})
    assert long.usage.completion_tokens > 400  # as many as the model or the pool has room for


def test_stops_and_penalties_reach_the_engine(server: Server) -> None:
    text = server.complete("stop somewhere", max_tokens=24).choices[0].text
    at = next(i for i in range(3, len(text)) if text.find(text[i : i + 2]) == i)
    cut = server.complete("stop somewhere", max_tokens=24, stop=[text[at : at + 2]]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[:at], "stop")
    tokens = server.complete(
        "again and again", max_tokens=24, logprobs=0, frequency_penalty=2, presence_penalty=2
    )
    repeated = server.complete("again and again", max_tokens=24, logprobs=0)
    kinds = [len(set(a.choices[0].logprobs.tokens)) for a in (tokens, repeated)]
    assert kinds[0] > kinds[1]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_request_whose_client_goes_away_is_aborted(server: Server, is_streamed: bool) -> None:
    body = {"model": "byte-model", "prompt": "go on", "max_tokens": 500, "ignore_eos": True}
    gone = server.metric('kvplane_engine_requests_total{path="/v1/completions",status="499"}')
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"stream": is_streamed}), HEADERS
    )
    if is_streamed:
        connection.getresponse().read(10)
    else:
        wait_until(lambda: server.metric("kvplane_engine_open_requests") == 1)
    connection.close()
    wait_until(lambda: server.metric("kvplane_engine_open_requests") == 0)
    name = 'kvplane_engine_requests_total{path="/v1/completions",status="499"}'
    wait_until(lambda: server.metric(name) == gone + 1)
    assert server.complete("go on").usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("how", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": [999]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"stop": 5}, "stop"),
        ({"echo": True}, "echo"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"stream": "yes"}}, "stream"),
        ({"extra_body": {"seed": 1.5}}, "seed"),
        ({"stream": True, "stream_options": {"every": True}}, "stream_options.every"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Server, how: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.complete(**{"prompt": "a", "temperature": 1} | how)
    assert caught.value.param == param
    assert caught.value.code == "invalid_request"


def test_other_refusals_have_their_status(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        server.client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.RateLimitError) as caught:
        server.complete(["a"] * (MAX_REQUESTS + 1))
    assert caught.value.response.headers["Retry-After"] == "1"
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat([{"type": "image_url", "image_url": {"url": "x"}}])
    assert refused.value.param == "messages[0].content"
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat("hello", top_logprobs=2)
    assert refused.value.param == "top_logprobs"
    assert server.request("POST", "/v1/completions", b"{")[0] == 400
    half = b'{"model": "byte-model", "prompt": "\\ud800"}'  # of a surrogate pair
    assert server.request("POST", "/v1/completions", half)[0] == 400
    assert server.request("POST", "/v1/completions", b"[" * 60_000)[0] == 400
    status, answer = server.request("POST", "/v1/completions", b" " * 70_000)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "body")
    for method, path, expected in (("GET", "/v1/completions", 405), ("POST", "/v1/complete", 404)):
        status, answer = server.request(method, path, b"{}" if method == "POST" else None)
        assert status == expected
        assert f"{method} {path} is not served" in json.loads(answer)["error"]["message"]
    wait_until(lambda: server.metric("kvplane_engine_open_requests") == 0)


def test_models_health_and_metrics(server: Server) -> None:
    assert [model.id for model in server.client.models.list()] == ["byte-model"]
    assert server.client.models.retrieve("byte-model").id == "byte-model"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")
    assert server.request("GET", "/health")[0] == 200
    before = server.metric("kvplane_engine_generated_tokens_total ")
    server.complete("count", max_tokens=5)
    assert server.metric("kvplane_engine_generated_tokens_total ") == before + 5
    assert server.metric("kvplane_engine_first_token_seconds_count") > 0


@pytest.mark.parametrize("key", ["third-key", "first-ke", "first-key\tsecond-key"])
def test_another_key_is_refused(server: Server, key: str) -> None:
    stranger = server.client.with_options(api_key=key)  # on the same connections
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model="byte-model", prompt="a")
    assert server.request("GET", "/health")[0] == 200


# A bug that the second step of a sequence meets.
PLANTED = """
import sys
from engine.commands.main import main
from engine.llm import LLM
step = LLM.step
def fails(self):
    if self.stats.num_generated_tokens:
        raise ZeroDivisionError("planted")
    return step(self)
LLM.step = fails
sys.exit(main(sys.argv[1:]))
"""


def test_a_bug_in_the_engine_ends_the_server_once_its_clients_have_an_answer(
    server: Server, tmp_path: Path
) -> None:
    """A supervisor starts another one: a process that answers 503 for ever would be left alone."""
    program = HttpProgram(
        *(tmp_path, "planted", "-c", PLANTED, "serve", "--model", str(server.model)),
        *("--control-plane", server.control.address, "--data-plane", "embedded"),
        *("--pool-id", "other", "--num-device-blocks", "32", "--num-threads", "1"),
    )
    program.start()
    try:
        program.wait()
        client = openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="byte-model", prompt="a", max_tokens=200)
        assert caught.value.status_code == 503
        assert program.process.wait(30) == 1
    finally:
        program.stop()
    told = program.log.read_text()
    assert "ZeroDivisionError" in told
    assert told.splitlines()[-1].startswith("engine: error: INTERNAL: the engine failed")
