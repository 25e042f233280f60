"""The engine's loop: schedule, step, compute, add the receipt, sample.

No token of a request is lost or returned twice, whatever happens to the planes: a token exists once
it was sampled, that is after its plan was receipted, and stays with its sequence; KV that is lost
is computed again from the tokens. Nothing is sampled from a plan that did not run to its end, so
the random streams do not move either.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import torch

from engine.models.loader import LoadedModel
from engine.request import CompletionOutput, Delta, Request, RequestOutput, SamplingParams
from engine.running.runner import Runner
from engine.sampling.detokenizer import Detokenizer
from engine.sampling.sampler import logprob_of, new_generator, sample
from engine.scheduling.intents import Span
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import EngineSequence, SequenceStatus
from engine.stats import EngineStats
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    PoolFullError,
    SessionNotFoundError,
    StaleError,
    UnavailableError,
)
from kvplane.layout import Layout
from kvplane.transformers.backend import DataBackend
from kvplane.transformers.link import ControlLink
from kvplane.v1 import types_pb2 as types

MAX_FAILURES: Final = 5  # failures, with nothing computed between them, before the engine raises
RETRY_DELAY_S: Final = 0.1
IDLE_DELAY_S: Final = 0.005
NEWS_DELAY_S: Final = 1.0  # without a notice, after which an answer's news are asked for

_log = logging.getLogger("engine")


@dataclass(slots=True)
class _Live:
    """A request that is not finished; ``sequences`` grows to ``n`` when the prompt is computed."""

    request: Request
    sequences: list[EngineSequence] = field(default_factory=list)
    error: KvplaneError | None = None


class EngineCore:
    """Runs requests. One thread calls it; ``abort`` may be called from any."""

    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        link: ControlLink,
        backend: DataBackend,
        scheduler: Scheduler,
        *,
        recovery_timeout_s: float,
    ) -> None:
        self._loaded = loaded
        self._layout = layout
        self._link = link
        self._backend = backend
        self._scheduler = scheduler
        self._max_sequences = scheduler.max_sequences
        self._runner = Runner(loaded.model)
        self._recovery_timeout_s = recovery_timeout_s
        self._live: dict[str, _Live] = {}
        self._deltas: list[Delta] = []
        self._outputs: dict[str, RequestOutput] = {}
        self._to_abort: set[str] = set()
        self._abort_lock = threading.Lock()
        self._num_arrivals = 0
        self._num_failures = 0
        self._has_plan = False  # the present step has a plan, which an error would have to abort
        self._stalled_since_s: float | None = None
        self._stepped_s = 0.0
        self.stats = EngineStats()

    # Requests.

    def check_prompt(self, token_ids: list[int], params: SamplingParams, *, field: str) -> None:
        """Raise InvalidRequestError naming ``field`` for a prompt that the model cannot take."""
        limit = self._loaded.max_total_tokens
        if not token_ids:
            raise InvalidRequestError("must not be empty", field=field)
        for i, token in enumerate(token_ids):
            if not 0 <= token < self._loaded.vocabulary_size:
                raise InvalidRequestError(
                    f"must be 0 to {self._loaded.vocabulary_size - 1}", field=f"{field}[{i}]"
                )
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"has {len(token_ids)} tokens, must have fewer than the model's {limit} positions",
                field=field,
            )
        if params.n > self._max_sequences:
            raise InvalidRequestError(
                f"must be at most max_sequences, {self._max_sequences}", field="sampling_params.n"
            )

    def add_request(self, prompt: str, token_ids: list[int], params: SamplingParams) -> str:
        """Queue a prompt that was checked; returns the request's id. ``max_tokens`` is cut to the
        positions that the model has.
        """
        room = self._loaded.max_total_tokens - len(token_ids)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        if params.repetition_penalty is None:
            penalty = self._loaded.repetition_penalty
            params = dataclasses.replace(params, repetition_penalty=penalty)
        ends = frozenset() if params.ignore_eos else self._loaded.end_token_ids
        self._num_arrivals += 1
        request = Request(
            request_id=f"request-{self._num_arrivals}",
            arrival=self._num_arrivals,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            end_token_ids=ends | frozenset(params.stop_token_ids),
        )
        first = self._new_sequence(request, 0)
        self._live[request.request_id] = _Live(request, [first])
        self._scheduler.add(first)
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += len(token_ids)
        return request.request_id

    def abort(self, request_id: str) -> None:
        """End a request at the next step, with what it has. Unknown and finished ones are left
        alone.
        """
        with self._abort_lock:
            self._to_abort.add(request_id)

    def take_output(self, request_id: str) -> RequestOutput | None:
        """The answer to a request that is done, once."""
        return self._outputs.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return self._scheduler.has_work or bool(self._to_abort)

    # Steps.

    def step(self) -> list[Delta]:
        """Run one step and return what it added. Recovers from planes that went away.

        Raises what went wrong when recovering does not help; sequences are then as they were.
        """
        self._apply_aborts()
        if self._scheduler.has_work:
            self._has_plan = False
            try:
                self._step()
            except KvplaneError as error:
                self._recover(error)
        deltas, self._deltas = self._deltas, []
        return deltas

    def settle(self) -> None:
        """Submit the last receipt, so that what was computed can be found by others."""
        try:
            self._link.submit_receipts()
        except KvplaneError as error:
            _log.warning("receipts were not submitted: %s", error)

    def _step(self) -> None:
        started_s = time.monotonic()
        intents = self._scheduler.schedule()
        if not intents and not self._expects_news():
            self._pause()
            return
        self._stepped_s = started_s
        result = self._link.step([intent.operation for intent in intents])
        self._has_plan = result.plan is not None
        outcome = self._scheduler.apply(intents, result)
        self._note_counts()
        for sequence, error in outcome.failed:
            self._fail(sequence.request.request_id, error)
        if result.plan is None:
            self._pause()
            return
        self._stalled_since_s = None
        logits = self._execute(result.plan, outcome.spans)
        if outcome.spans:
            self._num_failures = 0
        self._sample(outcome.spans, logits)
        num_tokens = sum(span.num_tokens for span in outcome.spans)
        self.stats.note_step(time.monotonic() - started_s, num_tokens)

    def _execute(self, plan: types.SignedPayload, spans: list[Span]) -> torch.Tensor:
        """Carry a plan out. Returns float32 logits [spans with is_last, vocabulary]."""
        started = self._backend.start(plan)
        receipts, logits = started.receipts, torch.empty(0)
        if not receipts:
            num_tokens = sum(span.num_tokens for span in spans)
            if started.num_tokens != num_tokens:
                raise InternalError(
                    f"the plan computes {started.num_tokens} tokens, not {num_tokens}"
                )
            logits = self._runner.run(spans, self._backend)
            receipts = self._backend.finish()
        self._link.add_receipts(receipts)
        return logits

    def _expects_news(self) -> bool:
        """Whether an admission that waits may have been granted. A notice says so, if it comes."""
        is_late = time.monotonic() - self._stepped_s > NEWS_DELAY_S
        return self._scheduler.is_in_line and (self._link.has_news(IDLE_DELAY_S) or is_late)

    def _pause(self) -> None:
        """Nothing could be done, because others hold the blocks. Fails the first request when that
        lasts too long.
        """
        now_s = time.monotonic()
        if self._stalled_since_s is None:
            self._stalled_since_s = now_s
        head = self._scheduler.head()
        if head is not None and now_s - self._stalled_since_s > self._recovery_timeout_s:
            self._stalled_since_s = None
            error = PoolFullError(
                f"the pool had no room for the request in {self._recovery_timeout_s:g} s; make it "
                "larger, end other sessions, or raise recovery_timeout_s"
            )
            self._fail(head.request.request_id, error)
        elif self._scheduler.num_idle_steps > 1:
            time.sleep(IDLE_DELAY_S)

    # Tokens.

    def _sample(self, spans: list[Span], logits: torch.Tensor) -> None:
        due = (span.sequence for span in spans if span.is_last)
        for sequence, span_logits in zip(due, logits, strict=True):
            if sequence.status is SequenceStatus.FINISHED:  # its request failed in this step
                continue
            if sequence.num_continuations > 1:
                self._branch(sequence, span_logits)
            else:
                self._take_token(sequence, span_logits)
                if sequence.finish_reason:
                    self._scheduler.finish(sequence)
            self._complete(sequence.request.request_id)

    def _branch(self, first: EngineSequence, logits: torch.Tensor) -> None:
        """The prompt is computed: its ``n`` continuations draw their first tokens and separate."""
        live = self._live[first.request.request_id]
        others = range(1, first.request.params.n)
        live.sequences += [self._new_sequence(first.request, i) for i in others]
        for sequence in live.sequences:
            self._take_token(sequence, logits)
        alive = [s for s in live.sequences if not s.finish_reason]
        self._scheduler.branch(first, alive)
        for sequence in live.sequences:
            if sequence.finish_reason:
                sequence.status = SequenceStatus.FINISHED

    def _take_token(self, sequence: EngineSequence, logits: torch.Tensor) -> None:
        request, params = sequence.request, sequence.request.params
        token = sample(
            logits, params, sequence.generator, sequence.tokens, sequence.num_prompt_tokens
        )
        sequence.tokens.append(token)
        logprob = None
        if params.logprobs is not None:
            logprob = logprob_of(logits, token, params.logprobs, self._loaded.decode)
            sequence.logprobs.append(logprob)
        if params.record_logits:
            sequence.logits.append(logits.clone())
        if token in request.end_token_ids or sequence.detokenizer.add(token):
            sequence.finish_reason = "stop"
        elif sequence.num_output_tokens >= params.max_tokens:
            sequence.finish_reason = "length"
        self.stats.num_generated_tokens += 1
        if sequence.finish_reason:
            sequence.detokenizer.finish()
        text = sequence.detokenizer.take(final=bool(sequence.finish_reason))
        delta = Delta(request.request_id, sequence.index, text, [token], sequence.finish_reason)
        self._deltas.append(dataclasses.replace(delta, logprob=logprob))

    # The end of a request.

    def _apply_aborts(self) -> None:
        with self._abort_lock:
            request_ids, self._to_abort = self._to_abort, set()
        for request_id in sorted(request_ids):
            self._end(request_id, "abort")

    def _fail(self, request_id: str, error: KvplaneError) -> None:
        if request_id in self._live:
            self._live[request_id].error = error
            self.stats.num_failed_requests += 1
            self._end(request_id, "error")

    def _end(self, request_id: str, reason: str) -> None:
        """End the unfinished continuations of a request."""
        live = self._live.get(request_id)
        if live is None:
            return
        for sequence in live.sequences:
            if not sequence.finish_reason:
                sequence.finish_reason = reason
                self._scheduler.finish(sequence)
                sequence.detokenizer.finish()
                text = sequence.detokenizer.take(final=True)
                self._deltas.append(Delta(request_id, sequence.index, text, [], reason, live.error))
        self._complete(request_id)

    def _complete(self, request_id: str) -> None:
        """Make the answer when all continuations are finished."""
        live = self._live[request_id]
        if not all(s.finish_reason for s in live.sequences):
            return
        del self._live[request_id]
        self.stats.num_cached_prompt_tokens += live.sequences[0].num_cached_tokens
        self._outputs[request_id] = RequestOutput(
            request_id=request_id,
            prompt=live.request.prompt,
            prompt_token_ids=live.request.prompt_token_ids,
            outputs=[_completion(s) for s in live.sequences],
            num_cached_tokens=live.sequences[0].num_cached_tokens,
            error=live.error,
        )

    # Recovery.

    def _recover(self, error: KvplaneError) -> None:
        """Abort the plan if the session is still open, else open another and compute again what is
        lost.
        """
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES or isinstance(error, LayoutMismatchError):
            raise error
        _log.warning("step failed reason=%s: %s", error.reason, error.message)
        lost = isinstance(error, StaleError | SessionNotFoundError | UnavailableError)
        if self._has_plan and not lost and self._abort_plan():
            return
        self._reopen()

    def _abort_plan(self) -> bool:
        """Abort the plan; whether that worked and the session continues."""
        try:
            states = self._link.abort_last_plan()
        except KvplaneError as error:
            _log.warning("abort failed reason=%s: %s", error.reason, error.message)
            return False
        self._scheduler.reconcile(states)
        self.stats.num_aborted_plans += 1
        return True

    def _reopen(self) -> None:
        """Open a new session, waiting for planes that are away; everything is admitted and computed
        again.
        """
        deadline_s = time.monotonic() + self._recovery_timeout_s
        self._scheduler.reset()
        while True:
            try:
                self._backend.close()
                self._backend.open(self._link.open(self._layout))
                break
            except LayoutMismatchError:
                raise
            except KvplaneError as error:
                if time.monotonic() > deadline_s:
                    raise
                _log.debug("session not reopened yet reason=%s: %s", error.reason, error.message)
                time.sleep(RETRY_DELAY_S)
        self.stats.num_reopened_sessions += 1
        _log.warning("session reopened id=%d", self._link.session.id)

    # Helpers.

    def _new_sequence(self, request: Request, index: int) -> EngineSequence:
        return EngineSequence(
            request=request,
            index=index,
            tokens=list(request.prompt_token_ids),
            generator=new_generator(request.params.seed, index),
            detokenizer=Detokenizer(self._loaded.tokenizer, request.params.stop),
        )

    def _note_counts(self) -> None:
        counts = self._scheduler.counts
        self.stats.num_swap_preemptions = counts.num_swap_preemptions
        self.stats.num_recompute_preemptions = counts.num_recompute_preemptions


def _completion(sequence: EngineSequence) -> CompletionOutput:
    return CompletionOutput(
        index=sequence.index,
        text=sequence.detokenizer.text,
        token_ids=sequence.output_token_ids,
        finish_reason=sequence.finish_reason,
        logits=torch.stack(sequence.logits) if sequence.logits else None,
        logprobs=tuple(sequence.logprobs),
    )
