"""Beam search: the continuations that are most likely as a whole, found as transformers finds them.

At each step the best candidates of all beams together are taken: those that end compete for the
answers, by their scores divided by a power of their lengths, and the best of the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ..request import SamplingParams

_NEVER: Final = -1.0e9  # a score, less than that of any candidate


class BeamSearch:
    """The search of one prompt. Scores are float32, as in transformers."""

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, end_token_ids: frozenset[int]
    ) -> None:
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._end_token_ids = end_token_ids
        # So many that enough of them go on, even if the best ones all end.
        self._num_candidates = max(2, 1 + len(end_token_ids)) * params.num_beams
        self._scores = torch.zeros(1)  # of the beams that go on, the best first
        self._best = [(_NEVER, False, list[int]())] * params.num_beams  # score, ended, tokens
        self._may_improve = True

    @property
    def answers(self) -> list[list[int]]:
        """The best token ids after the prompt, of ``n`` continuations, the best first."""
        return [tokens[self._num_prompt_tokens :] for _, _, tokens in self._best[: self._params.n]]

    def advance(
        self, beams: Sequence[Sequence[int]], log_probs: torch.Tensor
    ) -> list[tuple[int, int]]:
        """Take the next token of every beam. ``beams``: their tokens, the prompt's at first, in
        the order that the last call gave. ``log_probs``: float32 [num_beams, vocabulary].

        Returns the next beams: of which present one each is a continuation, and by which token.
        None when the search is over.
        """
        params, vocabulary = self._params, log_probs.shape[1]
        length = len(beams[0]) + 1 - self._num_prompt_tokens
        sums = (log_probs + self._scores[:, None]).flatten()
        scores, places = torch.topk(sums, min(self._num_candidates, len(sums)))
        candidates = [divmod(place, vocabulary) for place in places.tolist()]
        is_last = length >= params.max_tokens
        ends = torch.tensor([is_last or token in self._end_token_ids for _, token in candidates])
        going = scores + ends * _NEVER
        self._scores, chosen = torch.topk(going, min(params.num_beams, len(going)))

        self._note_ended(beams, candidates, scores, ends, length)
        self._may_improve &= self._can_improve(length)
        all_ended = all(ended for _, ended, _ in self._best)
        if not self._may_improve or (all_ended and params.early_stopping) or bool(ends.all()):
            return []
        return [candidates[i] for i in chosen.tolist()]

    def _note_ended(
        self,
        beams: Sequence[Sequence[int]],
        candidates: Sequence[tuple[int, int]],
        scores: torch.Tensor,
        ends: torch.Tensor,
        length: int,
    ) -> None:
        """Keep the best of those that ended, now and before."""
        params = self._params
        is_full = all(ended for _, ended, _ in self._best) and params.early_stopping
        scores = scores / (length**params.length_penalty)
        # Candidates beyond the number of beams are there only to go on.
        counts = ends & (torch.arange(len(ends)) < params.num_beams)
        scores = scores + (is_full + (not self._may_improve) + (~counts).float()) * _NEVER
        merged = torch.cat((torch.tensor([score for score, _, _ in self._best]), scores))
        values, places = torch.topk(merged, params.num_beams)
        best = []
        for score, place in zip(values.tolist(), places.tolist(), strict=True):
            if place < len(self._best):
                best.append((score, *self._best[place][1:]))
            else:
                beam, token = candidates[place - len(self._best)]
                ended = bool(counts[place - len(self._best)])
                best.append((score, ended, [*beams[beam], token]))
        self._best = best

    def _can_improve(self, length: int) -> bool:
        """Whether a beam that goes on can still be better than the worst that ended."""
        possible = self._scores[0] / (length**self._params.length_penalty)
        worst = min(score for score, _, _ in self._best)
        return any(bool(possible > (worst if ended else _NEVER)) for _, ended, _ in self._best)
