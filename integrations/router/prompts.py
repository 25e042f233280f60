"""Reads a request's prompts as token ids, as its engine will read them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvplane.errors import InvalidRequestError

# Tokens that a chat template adds to a message.
_CHARACTERS_PER_MESSAGE: Final = 64
# For texts that are not read. Most tokenizers make a token of three or four characters.
_CHARACTERS_PER_TOKEN: Final = 4
MAX_PROMPTS: Final = 64
"""Of one request, that are read."""
MAX_WAITING_CHARACTERS: Final = 1 << 18
"""Most that wait for the tokenizer. Further texts are not read: routing can do without."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """``token_ids`` of each prompt, and an estimate of tokens in prompts that were not read."""

    token_ids: Sequence[Sequence[int]] = ()
    num_unread_tokens: int = 0


class PromptReader:
    """Reads prompts in a thread of its own: tokenizers are not thread-safe.

    ``folder``: a model's; None reads token ids only. Raises InvalidRequestError for the field
    "tokenizer" when there is no tokenizer in it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._num_waiting_characters = 0
        self._tokenizer: Any = None if folder is None else _load(folder)

    async def read(self, body: Any) -> Prompts:
        """Return the prompts in the body of a request. A malformed or unknown body has none: the
        engine will report it.
        """
        if not isinstance(body, Mapping):
            return Prompts()
        if "messages" in body:
            return await self._chat(body["messages"])
        prompt = body.get("prompt")
        prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        if _is_ids(prompts):
            prompts = [prompts]
        del prompts[MAX_PROMPTS:]
        ids = [array("i", each) for each in prompts if _is_ids(each)]
        texts = [each for each in prompts if isinstance(each, str)]
        read, num_unread = await self._in_thread(self._encode, texts, sum(map(len, texts)))
        return Prompts([*ids, *read], num_unread)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _chat(self, messages: Any) -> Prompts:
        read = _messages(messages)
        num_characters = sum(len(message["content"]) for message in read)
        num_characters += _CHARACTERS_PER_MESSAGE * len(read)
        return Prompts(*await self._in_thread(self._encode_chat, read, num_characters))

    async def _in_thread(
        self, encode: Callable[[Any], list[array[int]]], what: Any, num_characters: int
    ) -> tuple[list[array[int]], int]:
        """Return the prompts that are read, and an estimate of the tokens of the others."""
        waiting = self._num_waiting_characters
        is_long = waiting and waiting + num_characters > MAX_WAITING_CHARACTERS
        if self._tokenizer is None or is_long:
            return [], num_characters // _CHARACTERS_PER_TOKEN
        self._num_waiting_characters += num_characters
        reading = self._thread.submit(encode, what)
        try:
            return await asyncio.wrap_future(reading), 0
        finally:
            self._num_waiting_characters -= num_characters

    def _encode(self, texts: Sequence[str]) -> list[array[int]]:
        prompts = []
        for text in texts:
            try:
                ids = list(self._tokenizer(text)["input_ids"])
            except (TypeError, ValueError):  # such as half of a surrogate pair
                continue
            while ids and ids[-1] == self._tokenizer.eos_token_id:
                ids.pop()
            prompts.append(array("i", ids))
        return prompts

    def _encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[array[int]]:
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception:  # templates are programs and may raise anything
            return []
        return [array("i", encoded["input_ids"])]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def _messages(value: Any) -> list[dict[str, str]]:
    """Return the messages, their parts of text joined; none when one of them is something else."""
    messages = []
    for message in value if isinstance(value, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            strings = [text for text in texts if isinstance(text, str)]
            content = "".join(strings) if len(strings) == len(content) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            return []
        messages.append({"role": message["role"], "content": content})
    return messages


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each tokenizer may raise anything
        raise InvalidRequestError(
            f"transformers cannot load it: {type(error).__name__}: {error}", field="tokenizer"
        ) from error
