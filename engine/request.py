"""A caller's requests and their answers.

Values only: nothing here knows blocks, queues or planes. Bad values are refused when they are made,
so that the rest of the engine never sees one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvplane.errors import InvalidRequestError, KvplaneError

MAX_SEED = 2**63
MAX_LOGPROBS = 20
MAX_BEAMS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Raises InvalidRequestError naming the field.

    max_tokens: the most tokens to generate.
    temperature: 0 means greedy.
    top_k, top_p, min_p: sample from this many likeliest tokens, from the likeliest that together
        reach this probability, from those with at least this share of the likeliest one's; 0, 1 and
        0 mean no limit.
    repetition_penalty: logits of tokens that are in the prompt or the text are divided by it where
        they are positive and multiplied where they are not (arXiv:1909.05858); None takes what the
        model's generation config says, 1 means none.
    frequency_penalty, presence_penalty: taken off the logit of a token for each time that it is in
        the text, and once if it is.
    seed: sample ``i`` of ``n`` draws from its own stream, seeded ``seed + i``, whatever else is in
        the batch; None takes a fresh seed.
    n: continuations of the prompt.
    stop: strings that end a text and are left out of it.
    stop_token_ids: tokens that end it, beside the model's own end of sequence; they stay in
        ``token_ids``.
    ignore_eos: continue past the model's end of sequence.
    record_logits: keep the raw logits of every generated token.
    logprobs: record the log probability of every generated token, before penalties and temperature,
        and those of this many most likely ones.
    num_beams: beams of a beam search, which gives its ``n`` best continuations; 1 searches nothing.
    length_penalty: of a beam search, the power of a continuation's length by which its score is
        divided; above 0 favours long ones.
    early_stopping: end a beam search when ``num_beams`` continuations have ended, and not only when
        no better one is to be expected.
    priority: lower ones go first and are preempted last; equal ones by arrival.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    record_logits: bool = False
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    logprobs: int | None = None
    priority: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def num_sequences(self) -> int:
        """The maximum number of sequences that a prompt becomes: continuations, or beams."""
        return max(self.n, self.num_beams)

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "at least 1")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "at least 0"
        )
        _require(0 <= self.top_k < 2**31, "top_k", f"0 to {2**31 - 1}")
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", "0 to 1")
        _require(1 <= self.n <= 256, "n", "1 to 256")
        _require(self.seed is None or 0 <= self.seed < MAX_SEED, "seed", f"0 to {MAX_SEED - 1}")
        penalty = self.repetition_penalty
        _require(penalty is None or 1e-3 <= penalty <= 1e3, "repetition_penalty", "0.001 to 1000")
        for name in ("frequency_penalty", "presence_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, "-2 to 2")
        _require(abs(self.priority) < 2**31, "priority", "an int32")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"0 to {MAX_LOGPROBS}",
        )
        _require(1 <= self.num_beams <= MAX_BEAMS, "num_beams", f"1 to {MAX_BEAMS}")
        _require(abs(self.length_penalty) <= 100, "length_penalty", "-100 to 100")
        if self.num_beams > 1:
            _require(self.n <= self.num_beams, "n", f"at most num_beams, {self.num_beams}")
            _require(self.temperature == 0, "temperature", "0 in a beam search")
            _require(not self.stop, "stop", "empty in a beam search")
            _require(self.logprobs is None, "logprobs", "none in a beam search")
            _require(not self.record_logits, "record_logits", "false in a beam search")
        _require(
            type(self.stop) is tuple and all(self.stop), "stop", "a tuple of non-empty strings"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability. ``likeliest``: of a generated token, the most likely ones
    in its place, the most likely first. ``data``: the token's UTF-8 bytes, maybe of a part of a
    character, which ``text`` replaces by U+FFFD; both are empty where the model has no tokenizer.
    ``text_offset``: where a generated token begins in its continuation's text, in characters.
    """

    token_id: int
    text: str
    logprob: float
    likeliest: tuple[TokenLogprob, ...] = ()
    data: bytes = b""
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the ``n`` continuations of a prompt.

    ``finish_reason``: "stop", "length", "abort" or "error". ``logits``: float32 [len(token_ids),
    vocabulary], before temperature and cuts, when they were asked for. ``logprobs``: one for each
    token, when they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logits: torch.Tensor | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. ``error`` is set when this request failed; its texts then end where
    it failed.

    ``num_cached_tokens``: prompt tokens whose KV was found cached when the prompt was first
    admitted.
    """

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: KvplaneError | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Holds what one step added to one continuation: final text, and the sampled token, if any.
    ``logprob``: of that token, if it was asked for.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str = ""
    error: KvplaneError | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt in the engine. ``arrival`` is higher than that of every earlier request."""

    request_id: str
    arrival: int
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    end_token_ids: frozenset[int] = field(default=frozenset())


def _require(ok: bool, name: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"must be {wanted}", field=f"sampling_params.{name}")
