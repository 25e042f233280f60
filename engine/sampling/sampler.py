"""Samples tokens from logits, for all rows of a step at once.

A row's token depends on its logits, its parameters and its random stream, never on what else is in
the batch. A stream has no state: its number at a position is a hash of its seed and that position.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..request import MAX_SEED, SamplingParams, TokenLogprob

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
# In float32 a smaller number may be 0, and a larger one infinite. At these ends one token has all
# probability, or all have the same.
_TEMPERATURES: Final = (1e-5, 1e5)
_LEAST_TOP_P: Final = 1e-30
_LEAST_LOGPROB: Final = -9999.0  # of a token that the model excludes: JSON has no infinity


class Row(Protocol):
    """Sampling parameters of one row of logits. ``stream``: from ``new_stream``."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def stream(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...


def new_stream(seed: int | None, index: int) -> int:
    """Return the random stream of continuation ``index``, an unsigned integer of 64 bits: the
    stream of seed ``seed + index``, or a fresh one when ``seed`` is None.
    """
    base = secrets.randbelow(MAX_SEED) if seed is None else seed
    return int(_hashed(np.array([(base + index) % MAX_SEED], np.uint64))[0])


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Return each row's next token from ``logits``, float32 [num_rows, vocabulary], computed on
    their device. From a GPU only the tokens are copied, and to it the rows' parameters, random
    numbers and, for penalties, tokens.
    """
    logits = penalised(logits, rows)
    tokens = _likeliest(logits)
    for is_nucleus in (False, True):
        drawn = [
            i
            for i, row in enumerate(rows)
            if row.params.temperature > 0 and (row.params.top_p < 1) is is_nucleus
        ]
        if drawn:
            of_rows = logits if len(drawn) == len(rows) else logits[drawn]
            found = _draw(of_rows, [rows[i] for i in drawn], is_nucleus=is_nucleus)
            tokens[torch.tensor(drawn, device=tokens.device)] = found
    chosen: list[int] = tokens.tolist()
    return chosen


def logprobs_of(
    logits: torch.Tensor,
    tokens: Sequence[int],
    nums_likeliest: Sequence[int],
    decode: Callable[[int], tuple[str, bytes]],
) -> list[TokenLogprob]:
    """Return the log probability of each row's token in ``logits`` float32 [num_rows, vocabulary],
    and those of the ``nums_likeliest`` most likely tokens. ``decode``: gives a token's text and
    bytes.
    """

    def of_token(token: int, value: float, *likeliest: TokenLogprob) -> TokenLogprob:
        text, data = decode(token)
        return TokenLogprob(token, text, value, likeliest, data)

    logprobs = torch.log_softmax(logits, dim=-1).clamp(min=_LEAST_LOGPROB)
    top = torch.topk(logprobs, min(max(nums_likeliest), logits.shape[1]))
    ids_of_rows = torch.tensor(tokens, device=logits.device)[:, None]
    of_tokens = logprobs.gather(1, ids_of_rows)[:, 0].tolist()
    ids, values = top.indices.tolist(), top.values.tolist()
    found = []
    for i, token in enumerate(tokens):
        likeliest = zip(ids[i][: nums_likeliest[i]], values[i], strict=False)
        found.append(of_token(token, of_tokens[i], *(of_token(*each) for each in likeliest)))
    return found


def penalised(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return ``logits`` [num_rows, vocabulary] after the penalties for tokens that were seen."""
    there = partial(torch.tensor, device=logits.device)
    repeated = [i for i, row in enumerate(rows) if row.params.repetition_penalty not in (None, 1.0)]
    if repeated:
        of_rows = logits[repeated]
        penalty = there([[rows[i].params.repetition_penalty] for i in repeated])
        seen = _counts([rows[i].tokens for i in repeated], logits) > 0
        changed = torch.where(of_rows > 0, of_rows / penalty, of_rows * penalty)
        logits = logits.index_copy(0, there(repeated), torch.where(seen, changed, of_rows))
    counted = [
        i
        for i, row in enumerate(rows)
        if row.params.frequency_penalty or row.params.presence_penalty
    ]
    if counted:
        generated = [rows[i].tokens[rows[i].num_prompt_tokens :] for i in counted]
        counts = _counts(generated, logits)
        frequency = there([[rows[i].params.frequency_penalty] for i in counted])
        presence = there([[rows[i].params.presence_penalty] for i in counted])
        changed = logits[counted] - frequency * counts - presence * (counts > 0)
        logits = logits.index_copy(0, there(counted), changed)
    return logits


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's likeliest token, the first of equal ones: int64 [num_rows]."""
    if logits.is_cpu:  # NumPy's is vectorised, torch's is not
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: torch.Tensor, rows: Sequence[Row], *, is_nucleus: bool) -> torch.Tensor:
    """Return a token for each row, int64 [num_rows], by a random number looked up in the sums of
    its probabilities: after the cuts to top-k, to min-p and, if ``is_nucleus``, to top-p
    (arXiv:1904.09751), in this order. The most likely token always stays. Top-k keeps k tokens, of
    equal ones the first.
    """

    def column(name: str) -> torch.Tensor:
        """Return a parameter of each row, [num_rows, 1], on the host: its values decide what is
        computed, and a device that is asked for them waits.
        """
        return torch.tensor([[getattr(row.params, name)] for row in rows])

    vocabulary, device = logits.shape[1], logits.device
    top_k, min_p = column("top_k"), column("min_p")
    if (top_k > 0).any():  # before the temperature, whose rounding can make logits equal
        largest = top_k.where((top_k > 0) & (top_k < vocabulary), vocabulary)
        most = largest.to(device)
        least = torch.topk(logits, int(largest.max())).values.gather(1, most - 1)
        above, equal = logits > least, logits == least
        room = most - above.sum(dim=-1, keepdim=True)
        kept = above | (equal & (equal.cumsum(dim=-1) <= room))
        logits = logits.masked_fill(~kept, -torch.inf)
    logits = logits / column("temperature").clamp(*_TEMPERATURES).to(device)
    if (min_p > 0).any():
        least = logits.max(dim=-1, keepdim=True).values + min_p.log().to(device)
        logits = logits.masked_fill(logits < least, -torch.inf)
    order = None
    if is_nucleus:
        logits, order = torch.sort(logits, descending=True, stable=True)
        probabilities = torch.softmax(logits, dim=-1)
        top_p = column("top_p").clamp(min=_LEAST_TOP_P).to(device)
        outside = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logits = logits.masked_fill(outside, -torch.inf)
    sums = torch.softmax(logits, dim=-1).double().cumsum(dim=-1)
    places = torch.searchsorted(sums, _uniform(rows).to(device) * sums[:, -1:], right=True)
    places = places.clamp(max=vocabulary - 1)  # for logits that are not numbers
    return (places if order is None else order.gather(1, places))[:, 0]


def _uniform(rows: Sequence[Row]) -> torch.Tensor:
    """Return each row's random number for its next token: float64 [num_rows, 1] in [0, 1)."""
    streams = np.array([row.stream for row in rows], np.uint64)
    places = np.array([len(row.tokens) - row.num_prompt_tokens for row in rows], np.uint64)
    # 32 bits: a product with a sum of probabilities never rounds up to that sum.
    bits = _hashed(streams + places * _STEP) >> np.uint64(32)
    return torch.from_numpy(bits.astype(np.float64) / 2.0**32)[:, None]


def _hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash by SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _counts(tokens: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Return how often each token is in each of ``tokens``: float32 [len(tokens), vocabulary], for
    ``logits`` and on their device.
    """
    vocabulary, lengths = logits.shape[1], [len(each) for each in tokens]
    ids = np.fromiter(chain.from_iterable(tokens), np.int64, sum(lengths))
    ids += np.repeat(np.arange(len(tokens)) * vocabulary, lengths)
    num = len(tokens) * vocabulary
    if not logits.is_cpu:  # the ids are fewer bytes than the counts
        there = torch.from_numpy(ids).to(logits.device)
        zeros = torch.zeros(num, device=logits.device)
        return zeros.index_add_(0, there, zeros.new_ones(len(ids))).view(len(tokens), vocabulary)
    counts = np.bincount(ids, minlength=num).astype(np.float32)
    return torch.from_numpy(counts).view(len(tokens), vocabulary)
