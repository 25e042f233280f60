"""Reads OpenAI's requests as prompts and sampling parameters. Refuses unserved fields by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplane.errors import InvalidRequestError

from ..models.loader import Message
from ..request import SamplingParams

Prompt = str | Sequence[int]

MAX_PROMPTS: Final = 64
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKENS: Final = 1024
_DEFAULT_MAX_TOKENS: Final = 16
_NO_MAX_TOKENS: Final = 2**31 - 1  # as many as the model has positions for

# Fields of both kinds of request: name in the request, and in SamplingParams.
_NUMBERS: Final = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
    "length_penalty",
)
_INTEGERS: Final = ("top_k", "seed", "n", "priority", "num_beams")
_SHARED: Final = {
    *_NUMBERS,
    *_INTEGERS,
    *("model", "stream", "stream_options", "stop", "repetition_penalty", "ignore_eos"),
    *("stop_token_ids", "logprobs", "max_tokens", "user", "metadata", "store", "logit_bias"),
    "early_stopping",
    *("safety_identifier", "prompt_cache_key", "service_tier"),
}
_OF_COMPLETIONS: Final = _SHARED | {"prompt", "echo", "best_of", "suffix"}
_OF_CHATS: Final = _SHARED | {
    *("messages", "top_logprobs", "max_completion_tokens", "response_format", "tools"),
    *("tool_choice", "parallel_tool_calls", "functions", "function_call", "modalities", "audio"),
    *("reasoning_effort", "verbosity", "prediction", "web_search_options"),
}
# Values that ask for nothing. Any other value is refused.
_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that is a conversation: messages with a "role" and a "content"."""

    messages: tuple[Message, ...]

    def __len__(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to continue prompts, or one conversation."""

    model: str
    prompts: tuple[Prompt | Chat, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool


def read_completion(body: Any) -> CompletionRequest:
    """Parse the body of ``/v1/completions``. Raises InvalidRequestError naming the field."""
    fields = _fields(body, _OF_COMPLETIONS)
    best_of = fields.get("best_of")
    if best_of not in (None, fields.get("n", 1)):
        raise InvalidRequestError("must be n: all continuations are given", field="best_of")
    logprobs = fields.get("logprobs")
    return _request(
        fields,
        _prompts(fields.get("prompt")),
        logprobs=None if logprobs is None else _integer(logprobs, "logprobs"),
        max_tokens=_integer(fields.get("max_tokens", _DEFAULT_MAX_TOKENS), "max_tokens"),
    )


def read_chat(body: Any) -> CompletionRequest:
    """Parse the body of ``/v1/chat/completions``. Raises InvalidRequestError naming the field."""
    fields = _fields(body, _OF_CHATS)
    most = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    logprobs = None
    if _boolean(fields.get("logprobs", False), "logprobs"):
        logprobs = _integer(fields.get("top_logprobs", 0), "top_logprobs")
    elif "top_logprobs" in fields:
        raise InvalidRequestError("needs logprobs", field="top_logprobs")
    return _request(
        fields,
        (Chat(_messages(fields.get("messages"))),),
        logprobs=logprobs,
        max_tokens=_integer(fields.get(most, _NO_MAX_TOKENS), most),
    )


def _request(
    fields: Mapping[str, Any],
    prompts: tuple[Prompt | Chat, ...],
    *,
    logprobs: int | None,
    max_tokens: int,
) -> CompletionRequest:
    searches = "num_beams" in fields and fields["num_beams"] != 1
    values: dict[str, Any] = {"temperature": 0.0 if searches else 1.0}
    values |= {name: _number(fields[name], name) for name in _NUMBERS if name in fields}
    values |= {name: _integer(fields[name], name) for name in _INTEGERS if name in fields}
    values["top_k"] = max(values.get("top_k", 0), 0)  # others write -1 for no limit
    if "repetition_penalty" in fields:
        values["repetition_penalty"] = _number(fields["repetition_penalty"], "repetition_penalty")
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            stop=_stops(fields.get("stop", ())),
            stop_token_ids=_stop_tokens(fields.get("stop_token_ids", [])),
            early_stopping=_boolean(fields.get("early_stopping", False), "early_stopping"),
            ignore_eos=_boolean(fields.get("ignore_eos", False), "ignore_eos"),
            logprobs=logprobs,
            **values,
        )
    except InvalidRequestError as error:
        name = error.field.removeprefix("sampling_params.")
        raise InvalidRequestError(error.message, field=name) from None
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequestError("must be an object", field="stream_options")
    for name in options.keys() - {"include_usage"}:
        raise InvalidRequestError("is not known", field=f"stream_options.{name[:64]}")
    return CompletionRequest(
        model=_string(fields.get("model"), "model"),
        prompts=prompts,
        params=params,
        stream=_boolean(fields.get("stream", False), "stream"),
        include_usage=_boolean(options.get("include_usage", False), "stream_options.include_usage"),
    )


def _fields(body: Any, known: set[str]) -> dict[str, Any]:
    """Return the body's fields that are not null; null means that a field is not given."""
    if not isinstance(body, dict):
        raise InvalidRequestError("must be a JSON object", field="body")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in known:
            raise InvalidRequestError("is not known", field=name[:64])
        if name in _NOTHING and value not in _NOTHING[name]:
            raise InvalidRequestError("is not served", field=name)
    return fields


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Parse the field "prompt": one text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return (_string(value, "prompt"),)
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return (value,)
        if len(value) > MAX_PROMPTS:
            raise InvalidRequestError(f"must have at most {MAX_PROMPTS} prompts", field="prompt")
        if all(isinstance(item, str) for item in value):
            return tuple(_string(item, f"prompt[{i}]") for i, item in enumerate(value))
        if all(isinstance(item, list) for item in value):
            return tuple(_integers(item, f"prompt[{i}]") for i, item in enumerate(value))
    raise InvalidRequestError("must be a string, token ids, or a list of either", field="prompt")


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("must be a list of messages", field="messages")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: Any, field: str) -> Message:
    """Parse a chat's message, whose content is a string, or parts of text."""
    if not isinstance(value, dict):
        raise InvalidRequestError("must be an object", field=field)
    for name, given in value.items():
        if name not in ("role", "content") and given not in (None, [], {}):
            raise InvalidRequestError(
                "is not served: messages have role and content", field=f"{field}.{name}"
            )
    content = value.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise InvalidRequestError("must have parts of text alone", field=f"{field}.content")
        content = "".join(_string(part.get("text"), f"{field}.content") for part in content)
    return {
        "role": _string(value.get("role"), f"{field}.role"),
        "content": _string(content, f"{field}.content"),
    }


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if (
        not isinstance(stops, list | tuple)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops)
    ):
        wanted = f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise InvalidRequestError(f"must be {wanted}", field="stop")
    return tuple(stops)


def _stop_tokens(value: Any) -> tuple[int, ...]:
    stops = _integers(value, "stop_token_ids")
    if len(stops) > MAX_STOP_TOKENS:
        raise InvalidRequestError(f"must be at most {MAX_STOP_TOKENS}", field="stop_token_ids")
    return tuple(stops)


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError("must be a number", field=field)
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequestError("must be a number", field=field) from error


def _integer(value: Any, field: str) -> int:
    if type(value) is not int:
        raise InvalidRequestError("must be an integer", field=field)
    return value


def _integers(value: Any, field: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InvalidRequestError("must be a list of integers", field=field)
    return value


def _boolean(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError("must be true or false", field=field)
    return value


def _string(value: Any, field: str) -> str:
    """Check that a value is a string of Unicode: JSON can also hold half of a surrogate pair."""
    if not isinstance(value, str):
        raise InvalidRequestError("must be a string", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("is not Unicode", field=field) from error
    return value
