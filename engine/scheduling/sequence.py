"""One continuation in the engine: its tokens, and how far each side knows them.

    position    0          num_computed     num_sent        len(tokens)
                |  KV planned  |  no KV yet     |  not sent yet  |
                |--------------------- known to the control plane ... to num_sent

A running sequence whose ``num_computed`` is ``len(tokens)`` has no next token yet: its logits are
being computed. That token counts as ``num_due``, and the next step may plan its slot before it is
known, which puts ``num_computed`` past ``num_sent`` until the token is sent. A plan in passes gives
several tokens, one after another, which are all due from its beginning on. The engine holds tokens
and counts, never K or V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import torch

from ..request import Request, SamplingParams, TokenLogprob
from ..sampling.detokenizer import Detokenizer

MAX_PASSES: Final = 64  # in one plan
MAX_WASTED_PASSES: Final = 16  # in which a sequence that has ended is still computed


class SequenceStatus(Enum):
    """The state of a sequence: the queue that it is in, or that it is finished."""

    WAITING = "waiting"  # no blocks: to be admitted with all its tokens
    RUNNING = "running"  # on the device tier
    SWAPPED = "swapped"  # on the host tier
    FORKING = "forking"  # shares its parent's blocks from the next step on
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A continuation of a request's prompt, one of ``n``. ``kv_id``: its id at the control plane; 0
    while it has no blocks. ``stream``: of its random numbers. ``state``: the model's running state
    after the computed tokens, if it has one (``running.states``); None before it was computed.
    """

    request: Request
    index: int
    tokens: list[int]
    stream: int
    detokenizer: Detokenizer
    status: SequenceStatus = SequenceStatus.WAITING
    kv_id: int = 0
    num_sent: int = 0
    num_computed: int = 0
    num_due: int = 0  # tokens that the plan which runs will give: more than 1 only in passes
    num_blocks: int = 0
    num_cached_tokens: int = 0
    num_admissions: int = 0
    finish_reason: str = ""
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    state: Any = None

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.request.params

    @property
    def place(self) -> tuple[int, int, int]:
        """Sort key of sequences: by priority, then by arrival, then by continuation. The smallest
        goes first and is preempted last. It never changes: two could preempt each other.
        """
        return (self.request.params.priority, self.request.arrival, self.index)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens, due ones included, whose KV no plan computes yet."""
        return len(self.tokens) + self.num_due - self.num_computed

    @property
    def can_run_ahead(self) -> bool:
        """Say whether the sequence's next token can be planned now. It cannot if the due token may
        end it by length or separates continuations, nor in a beam search, where all beams decide.
        """
        if self.num_due == 0:
            return True
        if self.params.num_beams > 1:
            return False
        is_last = self.num_output_tokens + self.num_due >= self.request.params.max_tokens
        return not is_last and self.num_continuations == 1

    @property
    def can_pass(self) -> bool:
        """Say whether the sequence continues one token at a time, as plans in passes do."""
        is_one = self.num_continuations == 1 and self.params.num_beams == 1
        return is_one and self.num_uncomputed <= 1

    def num_missing(self, num_slots: int, block_size_tokens: int) -> int:
        """Return how many more blocks the sequence needs for ``num_slots`` more slots."""
        num_blocks = -(-(self.num_computed + num_slots) // block_size_tokens)
        return max(0, num_blocks - self.num_blocks)

    @property
    def ends_by_length(self) -> bool:
        """Say whether only ``max_tokens`` can end the sequence, and no token or stop string."""
        return not (self.request.end_token_ids or self.params.stop)

    @property
    def num_left(self) -> int:
        """Maximum number of tokens that come after those known or due."""
        return self.params.max_tokens - self.num_output_tokens - self.num_due

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of tokens whose KV is ever needed: the last generated one needs none."""
        return self.num_prompt_tokens + self.request.params.max_tokens - 1

    @property
    def num_continuations(self) -> int:
        """Number of the request's continuations that the sequence stands for: all of them until the
        first token, then itself.
        """
        return self.params.num_sequences if self.num_output_tokens == 0 else 1

    def start(self, num_blocks: int, num_cached_tokens: int) -> None:
        """Record that the sequence was admitted: tokens that are not cached are to be computed."""
        self.status = SequenceStatus.RUNNING
        self.num_sent, self.num_computed = len(self.tokens), num_cached_tokens
        self.num_blocks = num_blocks
        if self.num_admissions == 0:
            self.num_cached_tokens = num_cached_tokens
        self.num_admissions += 1

    def forget_blocks(self) -> None:
        """Move the sequence back to waiting, to be admitted and computed again whole. Its tokens
        and its sampler's state stay.
        """
        self.status = SequenceStatus.WAITING
        self.kv_id = self.num_sent = self.num_computed = self.num_due = self.num_blocks = 0
        self.state = None


def most_passes(running: Sequence[EngineSequence]) -> int:
    """Return the maximum number of passes for a plan of these sequences. One that ends early is
    computed to the plan's end, unless it is the only one.
    """
    is_certain = all(sequence.ends_by_length for sequence in running)
    return MAX_PASSES if is_certain or len(running) == 1 else MAX_WASTED_PASSES
