"""A request that is answered by beam search: its beams are sequences, which all take their tokens
together. A beam with several continuations is forked, and shares its blocks with them; one with
none is freed.

The search finds the continuations that are most likely as a whole, as transformers finds them. At
each step the best candidates of all beams together are taken: those that end compete for the
answers, by their scores divided by a power of their lengths, and the best of the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from ..request import Delta, Request, SamplingParams
from ..sampling.sampler import penalised
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import EngineSequence, SequenceStatus

NewSequence = Callable[[Request, int], EngineSequence]
_NEVER: Final = -1.0e9  # a score, less than that of any candidate


class _BeamSearch:
    """The beam search for one prompt, on tokens alone. Scores are float32, as in transformers."""

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, end_token_ids: frozenset[int]
    ) -> None:
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._end_token_ids = end_token_ids
        # Enough of them to continue, even if the best ones all end.
        self._num_candidates = max(2, 1 + len(end_token_ids)) * params.num_beams
        self._scores = torch.zeros(1)  # of the live beams, the best first
        self._best = [(_NEVER, False, list[int]())] * params.num_beams  # score, ended, tokens
        self._may_improve = True

    @property
    def answers(self) -> list[list[int]]:
        """Return the token ids of the ``n`` best continuations, the best first."""
        return [tokens[self._num_prompt_tokens :] for _, _, tokens in self._best[: self._params.n]]

    def advance(
        self, beams: Sequence[Sequence[int]], log_probs: torch.Tensor
    ) -> list[tuple[int, int]]:
        """Choose the next token of every beam. ``beams``: their tokens, the prompt's at first, in
        the order that the last call gave. ``log_probs``: float32 [num_beams, vocabulary], on any
        device, from which the candidates alone are copied.

        Returns for each next beam the present beam that it continues, and its token. Returns
        nothing when the search is over.
        """
        params, vocabulary = self._params, log_probs.shape[1]
        length = len(beams[0]) + 1 - self._num_prompt_tokens
        sums = (log_probs + self._scores[:, None].to(log_probs.device)).flatten()
        found = torch.topk(sums, min(self._num_candidates, len(sums)))
        scores, places = found.values.cpu(), found.indices
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
        """Keep the best continuations that have ended, now and before."""
        params = self._params
        is_full = all(ended for _, ended, _ in self._best) and params.early_stopping
        scores = scores / (length**params.length_penalty)
        # Candidates beyond the number of beams may only continue.
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
        """Return whether a live beam could still score better than the worst continuation kept."""
        possible = self._scores[0] / (length**self._params.length_penalty)
        worst = min(score for score, _, _ in self._best)
        return any(bool(possible > (worst if ended else _NEVER)) for _, ended, _ in self._best)


class BeamRequest:
    """Answers one request by beam search, with a sequence for each beam."""

    def __init__(self, request: Request) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        self._request = request
        self._search = _BeamSearch(request.params, num_prompt_tokens, request.end_token_ids)
        self._logits: dict[EngineSequence, torch.Tensor] = {}

    def found(
        self, new_sequence: NewSequence, num_cached_tokens: int
    ) -> list[tuple[EngineSequence, Delta]]:
        """Return the ``n`` best continuations, with a delta each, when the search is over."""
        request, found = self._request, []
        for index, tokens in enumerate(self._search.answers):
            sequence = new_sequence(request, index)
            sequence.tokens += tokens
            sequence.num_cached_tokens = num_cached_tokens
            sequence.finish_reason = "stop" if tokens[-1] in request.end_token_ids else "length"
            for token in tokens:
                sequence.detokenizer.add(token)
            sequence.detokenizer.finish()
            text = sequence.detokenizer.take(final=True)
            delta = Delta(request.request_id, index, text, tokens, sequence.finish_reason)
            found.append((sequence, delta))
        return found

    def note(self, sequence: EngineSequence, logits: torch.Tensor) -> None:
        """Record the logits, float32 [vocabulary], from which a beam's next token is chosen."""
        self._logits[sequence] = logits

    def is_due(self, beams: list[EngineSequence]) -> bool:
        """Return whether all beams' logits are there: some beams may have been preempted."""
        return all(
            beam.status is SequenceStatus.RUNNING and beam.num_due > 0 and beam in self._logits
            for beam in beams
        )

    def advance(
        self, beams: list[EngineSequence], scheduler: Scheduler, new_sequence: NewSequence
    ) -> list[EngineSequence]:
        """Add the next token to each beam. Returns the beams that continue; none when the search is
        over, and ``beams`` are to be finished.
        """
        logits = torch.stack([self._logits[beam] for beam in beams])
        log_probs = penalised(torch.log_softmax(logits, dim=-1), beams)
        chosen = self._search.advance([beam.tokens for beam in beams], log_probs)
        if not chosen:
            return []
        self._logits.clear()
        children: list[list[EngineSequence]] = [[] for _ in beams]
        going = []
        for index, (place, token) in enumerate(chosen):
            child = new_sequence(self._request, index)
            child.tokens = [*beams[place].tokens, token]
            child.num_cached_tokens = beams[place].num_cached_tokens
            child.num_admissions = beams[place].num_admissions
            children[place].append(child)
            going.append(child)
        for beam, of_beam in zip(beams, children, strict=True):
            scheduler.branch(beam, of_beam)
        return going
