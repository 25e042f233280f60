"""The engine's loop: ask for a plan, compute it, sample; the next plan is asked for meanwhile.

No token of a request is lost or returned twice, whatever happens to the planes. A token exists once
it was sampled, that is after its plan was receipted, or after the plan's pass that gives it has
run, and stays with its sequence. KV that is lost is computed again from the tokens. Nothing is
sampled from a plan or pass that did not run to its end, so the random streams do not move either.

A plan is carried out at once, or in passes, which compute one token of each of its spans each. The
next pass computes the token that a pass gives, so the control plane is asked once for several steps
of decoding.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvplane import ops, tracing
from kvplane.errors import (
    DeadlineExceededError,
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
from kvplane.results import Signed, StepResult
from kvplane.runtime.backend import DataBackend
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import Pending, wait
from kvplane.transformers import attention
from kvplane.transformers.models.packed import packed_logits

from ..models.captured import CapturedDecoder
from ..models.compiled import CompiledDecoder
from ..models.loader import LoadedModel
from ..request import CompletionOutput, Delta, Request, RequestOutput, SamplingParams
from ..sampling.detokenizer import Detokenizer
from ..sampling.sampler import logprobs_of, new_stream, sample
from ..scheduling.intents import Intent, Outcome, Span
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import EngineSequence, SequenceStatus
from .beams import BeamRequest
from .states import StateRunner

MAX_FAILURES: Final = 5  # failures, with nothing computed between them, before the engine raises
RETRY_DELAY_S: Final = 0.1
# The first timeout of opening a session. Between attempts the engine notices ``give_up``.
ATTEMPT_S: Final = 2.0
_LEAST_ATTEMPT_S: Final = 0.5
IDLE_DELAY_S: Final = 0.005
# Up to two plans are computed before an engine asked to yield does so, within a second.
ALONE_PLAN_S: Final = 0.25
_LEAST_PASS_S: Final = 1e-6
NEWS_DELAY_S: Final = 1.0  # after which the engine asks for news that were not pushed

_log = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step that was sent to the control plane, and is not answered yet."""

    intents: list[Intent]
    answer: Pending[StepResult]
    span: Any
    """Tracing span of the step."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """The part of a plan to compute next. ``index``: of the pass; None for the whole plan."""

    plan: Signed
    plan_spans: Sequence[Span]
    index: int | None

    @property
    def spans(self) -> Sequence[Span]:
        """Return the spans to compute in this pass, without sequences that have ended."""
        index = self.index
        if index is None:
            return self.plan_spans
        return [
            replace(span, first_position=span.first_position + index, num_tokens=1, is_last=True)
            for span in self.plan_spans
            if span.num_tokens > index
        ]

    @property
    def num_left(self) -> int:
        """Number of passes of the plan after this one."""
        if self.index is None:
            return 0
        return max(span.num_tokens for span in self.plan_spans) - self.index - 1

    @property
    def following(self) -> _Pass | None:
        """Return the next pass of the plan; None after the last."""
        if self.index is None or not self.num_left:
            return None
        return replace(self, index=self.index + 1)


@dataclass(slots=True)
class _LiveRequest:
    """A request that is not answered yet. ``sequences`` grows to ``n`` when the prompt is computed;
    in a beam search, it has the live beams, and finally the answers.
    """

    request: Request
    sequences: list[EngineSequence] = field(default_factory=list)
    beams: BeamRequest | None = None
    error: KvplaneError | None = None

    @property
    def is_done(self) -> bool:
        """Return whether all continuations are finished."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """Return the request's answer so far."""
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


class Runner:
    """Runs a causal language model whose attention is "kvplane": one forward pass for each step,
    the new tokens of all sequences packed one after another, each with its own position.

    The model has no cache: attention goes to the data plane, which has every earlier token. Logits
    are computed only at the end of each span.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: CompiledDecoder | CapturedDecoder | None = None,
    ) -> None:
        """``decoder``: computes the steps in which each sequence has one token."""
        self._model = model
        self._decoder = decoder

    def run(self, spans: Sequence[Span], step: attention.Step) -> torch.Tensor:
        """Compute ``spans`` by ``step``. Returns float32 logits [spans, vocabulary]."""
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for span in spans:
            stop = span.first_position + span.num_tokens
            known = span.sequence.tokens[span.first_position : stop]
            # No token is taken for a sequence that ended in an earlier pass: any will do here.
            tokens += known or span.sequence.tokens[-1:]
            positions += range(span.first_position, stop)
            last.append(len(tokens) - 1)
        if self._decoder is not None and len(tokens) == len(spans):
            return self._decoder.logits(tokens, positions, step)
        return packed_logits(self._model, tokens, positions, last, step)


class EngineCore:
    """Runs all requests of an engine. One thread calls it; any may call ``abort``."""

    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        link: ControlLink,
        backend: DataBackend,
        scheduler: Scheduler,
        *,
        recovery_timeout_s: float,
        plans_ahead: bool = True,
        max_plan_s: float = 0.0,
    ) -> None:
        """``plans_ahead``: whether to request a step's plan while the one before is computed.
        ``max_plan_s``: how many seconds the passes of one plan may take together.
        """
        self._loaded = loaded
        self._layout = layout
        self._link = link
        self._backend = backend
        self._scheduler = scheduler
        self._max_sequences = scheduler.max_sequences
        self._runner: Runner | StateRunner = Runner(loaded.model, loaded.decoder)
        if loaded.states is not None:
            self._runner = StateRunner(loaded.model, loaded.states, layout.block_size_tokens)
        self._recovery_timeout_s = recovery_timeout_s
        self._plans_ahead = plans_ahead
        self._max_plan_s = max_plan_s if backend.has_passes else 0.0
        self.may_arrive = True
        """Say whether requests may come while a plan is computed, and so wait for all of it."""
        self._live: dict[str, _LiveRequest] = {}
        self._deltas: list[Delta] = []
        self._outputs: dict[str, RequestOutput] = {}
        self._to_abort: set[str] = set()
        self._abort_lock = threading.Lock()
        self._num_arrivals = 0
        self._num_failures = 0
        self._failing_since_s: float | None = None  # with nothing computed since
        self._has_session = True  # at both planes
        self._gives_up = threading.Event()
        self._has_plan = False  # the present step has a plan, which an error would have to abort
        self._asked: _Asked | None = None  # of the control plane, and not applied yet
        self._pass: _Pass | None = None  # of the present plan, to be computed next
        self._stalled_since_s: float | None = None
        self._stepped_s = 0.0
        self.stats = scheduler.stats

    # Requests.

    def check_prompt(self, token_ids: list[int], params: SamplingParams, *, field: str) -> None:
        """Check that the model can take the prompt. Raises InvalidRequestError naming ``field``."""
        limit = self._loaded.max_total_tokens
        if not token_ids:
            raise InvalidRequestError("must not be empty", field=field)
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"has {len(token_ids)} tokens, must have fewer than {self._loaded.limit}",
                field=field,
            )
        for i, token in enumerate(token_ids):
            if not 0 <= token < self._loaded.vocabulary_size:
                raise InvalidRequestError(
                    f"must be 0 to {self._loaded.vocabulary_size - 1}", field=f"{field}[{i}]"
                )
        if params.num_sequences > self._max_sequences:
            name = "num_beams" if params.num_beams > 1 else "n"
            raise InvalidRequestError(
                f"must be at most max_sequences, {self._max_sequences}",
                field=f"sampling_params.{name}",
            )

    def add_request(self, prompt: str, token_ids: list[int], params: SamplingParams) -> str:
        """Queue a prompt that was checked; returns the request's id. ``max_tokens`` is cut to the
        positions that the model has.
        """
        room = self._loaded.max_total_tokens - len(token_ids)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        if params.repetition_penalty is None:
            penalty = self._loaded.repetition_penalty
            params = replace(params, repetition_penalty=penalty)
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
        beams = BeamRequest(request) if params.num_beams > 1 else None
        self._live[request.request_id] = _LiveRequest(request, [first], beams)
        self._scheduler.arrive(first)
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += len(token_ids)
        return request.request_id

    def abort(self, request_id: str) -> None:
        """End a request with its present output, at the next step. Unknown ids are ignored."""
        with self._abort_lock:
            self._to_abort.add(request_id)

    def take_output(self, request_id: str) -> RequestOutput | None:
        """Return the answer to a request that is done, once; None if it is not done."""
        return self._outputs.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        """Return whether ``step`` has something to do."""
        is_under_way = self._asked is not None or self._pass is not None
        return self._scheduler.has_work or bool(self._to_abort) or is_under_way

    def give_up(self) -> None:
        """Stop waiting for planes, from now on: a waiting step raises. Any thread may call it."""
        self._gives_up.set()

    # Steps.

    def step(self) -> list[Delta]:
        """Run one step and return what it added. Recovers from planes that went away.

        Raises the error if recovery fails for ``recovery_timeout_s`` after the begin of the first
        failed step; sequences are then as they were.
        """
        self._apply_aborts()
        began_s = time.monotonic()
        if self.has_work and not self._has_session:  # an earlier step could not open another
            self._reopen(began_s)
        elif self.has_work:
            self._has_plan = self._pass is not None
            try:
                self._step()
            except KvplaneError as error:
                self._recover(error, began_s)
        deltas, self._deltas = self._deltas, []
        return deltas

    def settle(self) -> None:
        """Submit the last receipt, so that the blocks that the last step freed can be used."""
        self._link.submit_receipts()

    def _step(self) -> None:
        """Compute the plan's next pass, or else the requested step, and request the next one."""
        started_s = time.monotonic()
        if self._pass is not None:
            self._compute(self._pass, started_s)
            return
        asked = self._asked or self._ask(expects_news=True)
        if asked is None:
            self._pause()
            return
        try:
            self._carry_out(asked, started_s)
        finally:
            tracing.end(asked.span)

    def _carry_out(self, asked: _Asked, started_s: float) -> None:
        outcome, plan = self._take_answer(asked)
        if plan is None:
            self._pause()
            return
        self._stalled_since_s = None
        self._compute(_Pass(plan, outcome.spans, 0 if outcome.in_passes else None), started_s)

    def _compute(self, present: _Pass, started_s: float) -> None:
        """Compute a pass and add the tokens that it gives."""
        spans, self._pass = present.spans, None
        if spans and all(span.sequence.finish_reason for span in spans):
            self._abort_plan()  # all of its sequences have ended since it was asked for
            return
        logits = self._execute(present, spans)
        self._pass = present.following
        if spans:
            self._num_failures, self._failing_since_s = 0, None
        self._sample(spans, logits)
        seconds = time.monotonic() - started_s
        most_s = self._max_plan_s
        if most_s and not self.may_arrive:
            most_s = max(most_s, ALONE_PLAN_S)
        self._scheduler.max_passes = max(1, int(most_s / max(seconds, _LEAST_PASS_S)))
        self.stats.note_step(seconds, sum(span.num_tokens for span in spans))

    def _ask(self, *, expects_news: bool) -> _Asked | None:
        """Request the next step; None if there is nothing to request and no news comes soon."""
        intents = self._scheduler.schedule()
        if not intents and not (expects_news and self._expects_news()):
            return None
        self._stepped_s = time.monotonic()
        span = tracing.begin("engine.step", operations=len(intents))
        with tracing.inside(span):
            operations = [each.operation for each in intents]
            # Free of nothing asks for a plan: it drops the tables of sequences that were cut.
            answer = self._link.begin_step(operations or [ops.free([])])
        return _Asked(intents, answer, span)

    def _take_answer(self, asked: _Asked) -> tuple[Outcome, Signed | None]:
        """Wait for a step's answer and apply it."""
        self._asked = None
        result = wait(asked.answer)
        self._has_plan = result.plan is not None
        outcome = self._scheduler.apply(asked.intents, result)
        for sequence, error in outcome.failed:
            self._fail(sequence.request.request_id, error)
        return outcome, result.plan

    def _execute(self, present: _Pass, spans: Sequence[Span]) -> torch.Tensor:
        """Run a pass through the model. Returns float32 logits [spans with is_last, vocabulary]."""
        num_tokens = sum(span.num_tokens for span in spans)
        started = self._backend.start(present.plan, num_tokens, present.index)
        is_last = not present.num_left
        if is_last and self._plans_ahead and self._scheduler.can_run_ahead:
            self._asked = self._ask(expects_news=False)
        receipts, logits = started.receipts, torch.empty(0)
        if not receipts:
            if started.num_tokens != num_tokens:
                raise InternalError(
                    f"the plan computes {started.num_tokens} tokens, not {num_tokens}"
                )
            logits = self._runner.run(spans, self._backend)
            receipts = self._backend.finish(is_last=is_last)
            self._check_finite(spans, logits)
            if not all(span.is_last for span in spans):
                logits = logits[[span.is_last for span in spans]]
        if receipts:
            self._link.add_receipts(receipts)
        return logits

    def _check_finite(self, spans: Sequence[Span], logits: torch.Tensor) -> None:
        """Check that each span's logits, float32 [spans, vocabulary], have no NaN, no infinity, and
        something above -infinity. A part of a prompt is checked too, because its keys and values
        would become a cached prefix.

        Fails the requests whose logits are wrong, and raises InternalError: without its receipt the
        plan publishes nothing, and the other requests are computed again.
        """
        is_finite = logits.amax(dim=-1).isfinite().tolist()  # the largest is NaN if there is one
        if all(is_finite):
            return
        error = InternalError("the model's logits are not finite: they have NaN or infinity")
        for span, is_good in zip(spans, is_finite, strict=True):
            if not is_good and span.sequence.status is not SequenceStatus.FINISHED:
                self._fail(span.sequence.request.request_id, error)
        self._num_failures, self._failing_since_s = 0, None  # the planes did their part
        raise error

    def _expects_news(self) -> bool:
        """Return whether a queued admission may have been granted; pushed news may say so."""
        is_late = time.monotonic() - self._stepped_s > NEWS_DELAY_S
        return self._scheduler.is_queued and (self._link.has_news(IDLE_DELAY_S) or is_late)

    def _pause(self) -> None:
        """Count a step in which nothing could be done, because others hold the blocks. Fails the
        first request when that lasts too long.
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

    def _sample(self, spans: Sequence[Span], logits: torch.Tensor) -> None:
        """Sample the tokens that are due. A prompt's continuations draw their first tokens from the
        same logits, and separate.
        """
        due = [span.sequence for span in spans if span.is_last]
        groups = [self._continuations(sequence) for sequence in due]
        rows = [sequence for group in groups for sequence in group]
        places = [place for place, group in enumerate(groups) for _ in group]
        for place, sequence in enumerate(due):
            if sequence.params.num_beams > 1:
                live = self._live.get(sequence.request.request_id)
                if live is not None and live.beams is not None:
                    live.beams.note(sequence, logits[place])
        if rows:
            is_whole = places == list(range(len(due)))
            self._take_tokens(rows, logits if is_whole else logits[places])
        for first, group in zip(due, groups, strict=True):
            if len(group) > 1:
                self._scheduler.branch(first, group)
            elif group and first.finish_reason:
                self._scheduler.finish(first)
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in rows):
            self._complete(request_id)
        self._advance_beams()

    def _continuations(self, sequence: EngineSequence) -> list[EngineSequence]:
        """Return the continuations that take a token from these logits: all of the request's if
        they are its prompt's; none if it failed in this step, or in a beam search.
        """
        if sequence.status is SequenceStatus.FINISHED or sequence.params.num_beams > 1:
            return []
        if sequence.num_continuations == 1:
            return [sequence]
        live = self._live[sequence.request.request_id]
        others = range(1, sequence.params.n)
        live.sequences += [self._new_sequence(sequence.request, i) for i in others]
        return live.sequences

    def _advance_beams(self) -> None:
        """Choose the next tokens of beam searches whose beams are all computed."""
        for request_id, live in list(self._live.items()):
            if live.beams is None or not live.beams.is_due(live.sequences):
                continue
            going = live.beams.advance(live.sequences, self._scheduler, self._new_sequence)
            if going:
                live.sequences = going
                continue
            for sequence in live.sequences:
                self._scheduler.finish(sequence)
            found = live.beams.found(self._new_sequence, live.sequences[0].num_cached_tokens)
            live.sequences = [sequence for sequence, _ in found]
            self._deltas += [delta for _, delta in found]
            self.stats.num_generated_tokens += sum(len(delta.token_ids) for _, delta in found)
            self._complete(request_id)

    def _take_tokens(self, sequences: list[EngineSequence], logits: torch.Tensor) -> None:
        """Sample and add a token for each sequence. ``logits``: float32 [sequences, vocabulary]."""
        tokens = sample(logits, sequences)
        wanted = [i for i, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
        if wanted:
            found = logprobs_of(
                logits[wanted],
                [tokens[i] for i in wanted],
                [sequences[i].params.logprobs or 0 for i in wanted],
                self._loaded.decode,
            )
            for i, logprob in zip(wanted, found, strict=True):
                offset = len(sequences[i].detokenizer.text)
                sequences[i].logprobs.append(replace(logprob, text_offset=offset))
        for place, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence.params.record_logits:
                sequence.logits.append(logits[place].to("cpu", copy=True))
            self._take_token(sequence, token)

    def _take_token(self, sequence: EngineSequence, token: int) -> None:
        request, params = sequence.request, sequence.params
        sequence.num_due = max(0, sequence.num_due - 1)
        sequence.tokens.append(token)
        if token in request.end_token_ids or sequence.detokenizer.add(token):
            sequence.finish_reason = "stop"
        elif sequence.num_output_tokens >= params.max_tokens:
            sequence.finish_reason = "length"
        self.stats.num_generated_tokens += 1
        if sequence.finish_reason:
            sequence.detokenizer.finish()
        text = sequence.detokenizer.take(final=bool(sequence.finish_reason))
        logprob = sequence.logprobs[-1] if sequence.logprobs else None
        reason = sequence.finish_reason
        delta = Delta(request.request_id, sequence.index, text, [token], reason, logprob=logprob)
        self._deltas.append(delta)

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
                if sequence.index < live.request.params.n:  # of beams, so many are answers
                    text, index = sequence.detokenizer.take(final=True), sequence.index
                    self._deltas.append(Delta(request_id, index, text, [], reason, live.error))
        self._complete(request_id)

    def _complete(self, request_id: str) -> None:
        """Make a request's answer, when all its continuations are finished."""
        live = self._live[request_id]
        if live.is_done:
            del self._live[request_id]
            output = self._outputs[request_id] = live.output()
            self.stats.num_cached_prompt_tokens += output.num_cached_tokens

    # Recovery.

    def _recover(self, error: KvplaneError, began_s: float) -> None:
        """Abort the plans if the session is still open, else open another and compute lost KV
        again. ``began_s``: when the failed step began.
        """
        self._num_failures += 1
        if self._failing_since_s is None:
            self._failing_since_s = began_s
        if self._num_failures > MAX_FAILURES or isinstance(error, LayoutMismatchError):
            # If the caller continues, later errors are recovered from again.
            self._num_failures, self._failing_since_s = 0, None
            raise error
        _log.warning("step failed reason=%s: %s", error.reason, error.message)
        lost = isinstance(error, StaleError | SessionNotFoundError | UnavailableError)
        if not lost and (self._has_plan or self._asked is not None):
            try:
                if self._asked is not None:
                    self._take_answer(self._asked)
                self._abort_plan()
                self.stats.num_aborted_plans += 1
                return
            except KvplaneError as failure:
                _log.warning("abort failed reason=%s: %s", failure.reason, failure.message)
        self._reopen(self._failing_since_s)

    def _abort_plan(self) -> None:
        """Abort the plans without receipts, and continue from the control plane's state."""
        self._scheduler.reconcile(self._link.abort_last_plan())

    def _reopen(self, since_s: float) -> None:
        """Open a new session, waiting for planes that have been away since ``since_s``; all
        sequences are admitted and computed again.
        """
        deadline_s = since_s + self._recovery_timeout_s
        attempt_s = ATTEMPT_S
        if self._asked is not None:
            self._asked.answer.cancel()
            self._asked = None
        self._scheduler.reset()
        self._has_session = False
        while True:
            try:
                self._backend.close()
                left_s = max(_LEAST_ATTEMPT_S, deadline_s - time.monotonic())
                self._backend.open(self._link.open(self._layout, min(attempt_s, left_s)))
                break
            except LayoutMismatchError:
                raise
            except KvplaneError as error:
                is_late = time.monotonic() + RETRY_DELAY_S + _LEAST_ATTEMPT_S > deadline_s
                if is_late or self._gives_up.wait(RETRY_DELAY_S):
                    self._num_failures, self._failing_since_s = 0, None
                    raise
                _log.debug("session not reopened yet reason=%s: %s", error.reason, error.message)
                if isinstance(error, DeadlineExceededError):  # a slow plane, if it is one
                    attempt_s = 2 * attempt_s
        self._has_session = True
        self.stats.num_reopened_sessions += 1
        _log.warning("session reopened id=%d", self._link.session.id)

    # Helpers.

    def _new_sequence(self, request: Request, index: int) -> EngineSequence:
        return EngineSequence(
            request=request,
            index=index,
            tokens=list(request.prompt_token_ids),
            stream=new_stream(request.params.seed, index),
            detokenizer=Detokenizer(
                self._loaded.tokenizer, request.params.stop, request.prompt_token_ids
            ),
        )
