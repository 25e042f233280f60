"""A request that is answered by beam search: its beams are sequences, which all take their tokens
together. A beam with several continuations is forked, and shares its blocks with them; one with
none is freed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..request import Delta, Request
from ..sampling.beam_search import BeamSearch
from ..sampling.sampler import penalised
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import EngineSequence, SequenceStatus

NewSequence = Callable[[Request, int], EngineSequence]


class BeamRequest:
    """The search for one request."""

    def __init__(self, request: Request) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        self._request = request
        self._search = BeamSearch(request.params, num_prompt_tokens, request.end_token_ids)
        self._logits: dict[EngineSequence, torch.Tensor] = {}

    def found(
        self, new_sequence: NewSequence, num_cached_tokens: int
    ) -> list[tuple[EngineSequence, Delta]]:
        """The ``n`` best continuations, when the search is over, and what is told of each."""
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
        """A beam's next token is due: float32 [vocabulary]."""
        self._logits[sequence] = logits

    def is_due(self, beams: list[EngineSequence]) -> bool:
        """Whether the next tokens of all beams are: some may have been preempted meanwhile."""
        return all(
            beam.status is SequenceStatus.RUNNING and beam.num_due > 0 and beam in self._logits
            for beam in beams
        )

    def advance(
        self, beams: list[EngineSequence], scheduler: Scheduler, new_sequence: NewSequence
    ) -> list[EngineSequence]:
        """Take the next tokens. Returns the beams that go on; none when the search is over, and
        ``beams`` are to be finished.
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
