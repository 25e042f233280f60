"""Requests that are not finished."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvplane.errors import KvplaneError

from ..request import CompletionOutput, Request, RequestOutput
from ..scheduling.sequence import EngineSequence
from .beams import BeamRequest


@dataclass(slots=True)
class LiveRequest:
    """``sequences`` grows to ``n`` when the prompt is computed; of a beam search, they are the
    beams that go on, and what it found in the end.
    """

    request: Request
    sequences: list[EngineSequence] = field(default_factory=list)
    beams: BeamRequest | None = None
    error: KvplaneError | None = None

    @property
    def is_done(self) -> bool:
        """Whether all continuations are finished."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The answer."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[_completion(s) for s in self.sequences[: request.params.n]],
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            error=self.error,
        )


def _completion(sequence: EngineSequence) -> CompletionOutput:
    return CompletionOutput(
        index=sequence.index,
        text=sequence.detokenizer.text,
        token_ids=sequence.output_token_ids,
        finish_reason=sequence.finish_reason,
        logits=torch.stack(sequence.logits) if sequence.logits else None,
        logprobs=tuple(sequence.logprobs),
    )
