"""Forms OpenAI's objects from a request's output: whole, or in pieces for a stream."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from ..request import Delta, RequestOutput, TokenLogprob


@dataclass(slots=True)
class _Choice:
    """A choice in an answer: one continuation, as far as it is known."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Answer:
    """Builds the answer to one HTTP request: its choices are those of its prompts, one after
    another.

    ``is_chat``: whether it has the form of a chat's answer.
    """

    def __init__(self, model: str, num_prompts: int, n: int, *, is_chat: bool) -> None:
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._model = model
        self._n = n
        self._is_chat = is_chat
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(num_prompts * n)]
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0

    def add(self, prompt: int, event: Delta | RequestOutput) -> list[dict[str, Any]]:
        """Add a prompt's new output. Returns the objects that a stream sends for it."""
        if isinstance(event, RequestOutput):
            self.num_prompt_tokens += len(event.prompt_token_ids)
            self.num_cached_tokens += event.num_cached_tokens
            return []
        self.num_generated_tokens += len(event.token_ids)
        index = prompt * self._n + event.index
        choice = self._choices[index]
        choice.text += event.text
        choice.finish_reason = event.finish_reason or None
        if event.logprob is not None:
            choice.logprobs.append(event.logprob)
        if not (event.text or event.finish_reason or event.logprob):
            return []
        piece = _Choice(event.text, choice.finish_reason)
        if event.logprob is not None:
            piece.logprobs.append(event.logprob)
        return [self._object([self._chunk(index, piece)], is_chunk=True)]

    def opening(self) -> list[dict[str, Any]]:
        """Return the first objects of a stream."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._object(
                [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}],
                is_chunk=True,
            )
            for i in range(len(self._choices))
        ]

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once all prompts are answered."""
        choices = [self._full(index, choice) for index, choice in enumerate(self._choices)]
        return self._object(choices, is_chunk=False) | {"usage": self.usage()}

    def closing(self) -> dict[str, Any]:
        """Return the last object of a stream whose client asked for its usage."""
        return self._object([], is_chunk=True) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the token counts of prompts and continuations."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def _object(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _chunk(self, index: int, piece: _Choice) -> dict[str, Any]:
        common = {
            "index": index,
            "finish_reason": piece.finish_reason,
            "logprobs": self._logprobs(piece),
        }
        if self._is_chat:
            return common | {"delta": {"content": piece.text} if piece.text else {}}
        return common | {"text": piece.text}

    def _full(self, index: int, choice: _Choice) -> dict[str, Any]:
        common = {
            "index": index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice),
        }
        if self._is_chat:
            return common | {"message": {"role": "assistant", "content": choice.text}}
        return common | {"text": choice.text}

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if not choice.logprobs:
            return None
        if self._is_chat:
            return {"content": [_chat_logprob(each) for each in choice.logprobs]}
        return {
            "tokens": [_name(each) for each in choice.logprobs],
            "token_logprobs": [each.logprob for each in choice.logprobs],
            "top_logprobs": [
                {_name(other): other.logprob for other in each.likeliest}
                for each in choice.logprobs
            ],
            "text_offset": [each.text_offset for each in choice.logprobs],
        }


def _chat_logprob(each: TokenLogprob) -> dict[str, Any]:
    return _of_token(each) | {"top_logprobs": [_of_token(other) for other in each.likeliest]}


def _of_token(each: TokenLogprob) -> dict[str, Any]:
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.data)}


def _name(each: TokenLogprob) -> str:
    r"""Return a token's text; of a part of a character its bytes, as ``bytes:\xf0\x9f``."""
    if each.text.encode() == each.data:
        return each.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in each.data)
