"""From logits to tokens.

A token depends on its row of logits, the parameters and the sequence's own random generator, never
on what else is in the batch: every row is handled by itself.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence

import torch

from engine.request import MAX_SEED, SamplingParams, TokenLogprob


def new_generator(seed: int | None, index: int) -> torch.Generator:
    """The random stream of continuation ``index``: seeded ``seed + index``, or freshly when
    ``seed`` is None.
    """
    generator = torch.Generator(device="cpu")
    base = secrets.randbelow(MAX_SEED) if seed is None else seed
    generator.manual_seed((base + index) % MAX_SEED)
    return generator


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator,
    seen: Sequence[int] = (),
    num_prompt_tokens: int = 0,
) -> int:
    """The next token from ``logits`` float32 [vocabulary] on CPU. Greedy takes no random number;
    sampling takes one. ``seen``: the tokens so far, for the penalties.
    """
    if params.repetition_penalty not in (None, 1.0):
        logits = _penalised(logits, params.repetition_penalty, seen)
    if params.frequency_penalty or params.presence_penalty:
        logits = _less_often(logits, params, seen[num_prompt_tokens:])
    if params.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(_cut(logits / params.temperature, params), dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def logprob_of(
    logits: torch.Tensor, token_id: int, num_likeliest: int, decode: Callable[[int], str]
) -> TokenLogprob:
    """A token's log probability in ``logits`` float32 [vocabulary], and the likeliest tokens'."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, min(num_likeliest, logprobs.numel()))
    likeliest = (
        TokenLogprob(each, decode(each), logprob)
        for each, logprob in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    return TokenLogprob(token_id, decode(token_id), float(logprobs[token_id]), tuple(likeliest))


def _penalised(logits: torch.Tensor, penalty: float, seen: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor(sorted(set(seen)), dtype=torch.long)
    of_seen = logits[tokens]
    of_seen = torch.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
    return logits.index_copy(0, tokens, of_seen)


def _less_often(
    logits: torch.Tensor, params: SamplingParams, generated: Sequence[int]
) -> torch.Tensor:
    tokens = torch.tensor(generated, dtype=torch.long)
    counts = torch.bincount(tokens, minlength=logits.numel())
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def _cut(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """``logits`` with everything outside of top-k, then of min-p, then of top-p (nucleus sampling,
    arXiv:1904.09751), at minus infinity.

    The most likely token always stays.
    """
    if 0 < params.top_k < logits.numel():
        least = torch.topk(logits, params.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.min_p > 0:
        least = logits.max() + math.log(params.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        ordered, order = torch.sort(logits, descending=True, stable=True)
        before = torch.softmax(ordered, dim=-1).cumsum(dim=-1) - torch.softmax(ordered, dim=-1)
        outside = before >= params.top_p
        logits = logits.masked_fill(
            torch.zeros_like(outside).scatter(0, order, outside), -torch.inf
        )
    return logits
